package org.lapilli;

import java.io.ByteArrayOutputStream;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.Map;

/**
 * A language model that lapilli.LLM saved: it writes text, in ExecuTorch's shape.
 *
 * <pre>
 * LlmModule module = new LlmModule("model.lap", 0.7f);
 * module.generate("Once upon a time", 200, text -> System.out.print(text));
 * </pre>
 *
 * <p>Texts follow each other until resetContext(): a conversation gives only what is new. One thread generates at a time, others wait;
 * stop() may be called from any. Tokens are chosen on the device.
 */
public final class LlmModule implements AutoCloseable {
  /** Tokens of prompt and text together, unless generate is told otherwise. */
  public static final int DEFAULT_SEQ_LEN = 128;

  private final Module module;
  private final Handle writer;
  private final Tokenizer tokenizer;
  private final int[] ends;
  private final int context;
  private final int words;
  private float temperature;
  private float topP = 1;
  private float minP = 0;
  private float repetitionPenalty = 1;
  private int topK = 0;
  private Integer seed;
  private int[] history = new int[0];
  private volatile boolean stopped;

  public LlmModule(String path, float temperature) {
    this(Module.load(path), null, temperature);
  }

  /** module: of a language model, which is closed with this one. tokenizer: null: the file's own. */
  public LlmModule(Module module, Tokenizer tokenizer, float temperature) {
    this.module = module;
    setTemperature(temperature);
    try {
      writer = module.writer(this);
      this.tokenizer = tokenizer != null ? tokenizer : ByteLevelTokenizer.ofJson(text("llm.tokenizer"));
      List<?> given = (List<?>) ((Map<?, ?>) Json.parse(text("llm.text"))).get("ends");
      ends = given.stream().mapToInt(end -> ((Number) end).intValue()).toArray();
    } catch (RuntimeException | Error failed) {
      module.close();
      throw failed;
    }
    long[] about = about();
    context = (int) about[0];
    words = (int) about[1];
  }

  private String text(String name) {
    String found = module.metadata(name);
    if (found == null)
      throw new LapilliException(LapilliException.Status.INVALID_FILE, "The language model is damaged: it has no \"" + name + "\".");
    return found;
  }

  // -- how tokens are chosen

  /** 0: the likeliest. */
  public synchronized void setTemperature(float temperature) {
    if (!(temperature >= 0)) throw new IllegalArgumentException("The temperature is " + temperature + "; it is a number >= 0.");
    this.temperature = temperature;
  }

  /** 0: all tokens. */
  public synchronized void setTopK(int topK) {
    this.topK = topK;
  }

  /** 1: all tokens. */
  public synchronized void setTopP(float topP) {
    this.topP = topP;
  }

  /** 0: all tokens. */
  public synchronized void setMinP(float minP) {
    this.minP = minP;
  }

  /** 1: none. */
  public synchronized void setRepetitionPenalty(float penalty) {
    repetitionPenalty = penalty;
  }

  /** null: another one each time. */
  public synchronized void setSeed(Integer seed) {
    this.seed = seed;
  }

  // -- writing

  public int generate(String prompt, LlmCallback callback) {
    return generate(prompt, DEFAULT_SEQ_LEN, callback, false);
  }

  public int generate(String prompt, int seqLen, LlmCallback callback) {
    return generate(prompt, seqLen, callback, false);
  }

  /**
   * Writes what follows a prompt, until a token ends the text, stop() is called, or prompt and text have seqLen tokens or the model's
   * context is full. echo: the prompt is told first. Returns 0; failures are exceptions.
   */
  public synchronized int generate(String prompt, int seqLen, LlmCallback callback, boolean echo) {
    stopped = false;
    try {
      int[] given = tokenizer.encode(prompt, history.length == 0);
      int[] tokens = Arrays.copyOf(history, history.length + given.length);
      System.arraycopy(given, 0, tokens, history.length, given.length);
      long start = System.currentTimeMillis();
      int count = tokens.length;
      int prompted = count;
      int last = (int) Math.min((long) history.length + seqLen, (long) context);
      long first = start;
      Utf8 utf8 = new Utf8();
      if (echo) callback.onResult(prompt);
      long address = writer.enter();
      try {
        Native.begin(address, tokens, new float[] {temperature, topP, minP, repetitionPenalty}, topK, draw());
        tokens = Arrays.copyOf(tokens, Math.max(count, last) + 1);
        while (count < last && !stopped) {
          int token = Native.next(address);
          if (count == prompted) first = System.currentTimeMillis();
          tokens[count++] = token;
          if (isEnd(token)) break;
          tell(callback, utf8.take(tokenizer.decode(token)));
        }
        tell(callback, utf8.rest());
      } finally {
        writer.exit();
        history = Arrays.copyOf(tokens, count);
      }
      callback.onStats(
          String.format(
              java.util.Locale.ROOT,
              "{\"prompt_tokens\":%d,\"generated_tokens\":%d,\"inference_start_ms\":%d,\"first_token_ms\":%d,"
                  + "\"inference_end_ms\":%d}",
              given.length,
              count - prompted,
              start,
              first,
              System.currentTimeMillis()));
      return 0;
    } catch (LapilliException failed) {
      callback.onError(failed.status().ordinal(), failed.getMessage());
      throw failed;
    }
  }

  /** Ends generate after the token that is being written. From any thread, also from a callback. */
  public void stop() {
    stopped = true;
  }

  /** The next prompt begins a sequence. */
  public synchronized void resetContext() {
    history = new int[0];
  }

  /** Tokens that prompt and text may have together. */
  public int context() {
    return context;
  }

  /** Tokens are 0 to words() - 1. */
  public int words() {
    return words;
  }

  /** How many tokens were computed so far; those that the cache had were not. */
  public long tokensRead() {
    return about()[2];
  }

  private long[] about() {
    long address = writer.enter();
    try {
      return Native.aboutWriter(address);
    } finally {
      writer.exit();
    }
  }

  private int draw() {
    return seed != null ? seed : java.util.concurrent.ThreadLocalRandom.current().nextInt();
  }

  private boolean isEnd(int token) {
    for (int end : ends) if (end == token) return true;
    return false;
  }

  private static void tell(LlmCallback callback, String text) {
    if (!text.isEmpty()) callback.onResult(text);
  }

  @Override
  public void close() {
    stop();
    writer.close();
    module.close();
  }

  /** Characters of bytes that come in pieces. */
  static final class Utf8 {
    private final ByteArrayOutputStream held = new ByteArrayOutputStream();

    /** The characters that are complete. */
    String take(byte[] bytes) {
      held.write(bytes, 0, bytes.length);
      byte[] all = held.toByteArray();
      int whole = all.length - incomplete(all);
      held.reset();
      held.write(all, whole, all.length - whole);
      return new String(all, 0, whole, StandardCharsets.UTF_8);
    }

    /** What was held back, which is no character. */
    String rest() {
      String text = new String(held.toByteArray(), StandardCharsets.UTF_8);
      held.reset();
      return text;
    }

    /** How many bytes at the end begin a character that needs more. */
    private static int incomplete(byte[] bytes) {
      for (int back = 1; back <= Math.min(3, bytes.length); ++back) {
        int b = bytes[bytes.length - back] & 0xff;
        if (b >= 0xc0) return (b >= 0xf0 ? 4 : b >= 0xe0 ? 3 : 2) > back ? back : 0;
        if (b < 0x80) return 0;
      }
      return 0;
    }
  }
}
