package org.lapilli;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import org.junit.Test;

/** Language models: tokens and texts are those of Python's lapilli.LLM and of Hugging Face's tokenizers. */
public class LlmTest {
  private static final Map<?, ?> EXPECTED = read();

  private static Map<?, ?> read() {
    try {
      return (Map<?, ?>) Json.parse(new String(Files.readAllBytes(Models.FOLDER.resolve("llm.json")), StandardCharsets.UTF_8));
    } catch (java.io.IOException wrong) {
      throw new AssertionError(wrong);
    }
  }

  private static int[] ints(Object list) {
    return ((List<?>) list).stream().mapToInt(x -> ((Number) x).intValue()).toArray();
  }

  private static List<?> texts() {
    return (List<?>) EXPECTED.get("texts");
  }

  private static Map<?, ?> answer(int i) {
    return (Map<?, ?>) ((List<?>) EXPECTED.get("answers")).get(i);
  }

  private static String prompt() {
    return (String) texts().get(2);
  }

  private static LlmModule load() {
    return new LlmModule(Models.path("llm"), 0);
  }

  private static int promptTokens() {
    return ints(EXPECTED.get("prompt")).length;
  }

  /** Collects what is told. */
  private static class Collector implements LlmCallback {
    final StringBuilder text = new StringBuilder();
    final List<String> pieces = new ArrayList<>();
    String stats;

    @Override
    public void onResult(String result) {
      text.append(result);
      pieces.add(result);
    }

    @Override
    public void onStats(String stats) {
      this.stats = stats;
    }
  }

  @Test
  public void tokenizersAreThoseOfHuggingFace() {
    for (Object of : (List<?>) EXPECTED.get("tokenizers")) {
      Map<?, ?> expected = (Map<?, ?>) of;
      ByteLevelTokenizer tokenizer = ByteLevelTokenizer.ofJson((String) expected.get("json"));
      for (int i = 0; i < texts().size(); ++i)
        assertArrayEquals((String) texts().get(i), ints(((List<?>) expected.get("tokens")).get(i)), tokenizer.encode((String) texts().get(i), true));
      LlmModule.Utf8 utf8 = new LlmModule.Utf8();
      StringBuilder back = new StringBuilder();
      String text = (String) texts().get(3);
      for (int token : tokenizer.encode(text, false)) back.append(utf8.take(tokenizer.decode(token)));
      assertEquals(text, back + utf8.rest());
      assertEquals(0, tokenizer.decode(-1).length + tokenizer.decode(1 << 30).length);
    }
  }

  @Test
  public void otherTokenizersAreRefused() {
    String bpe = "{\"model\": {\"type\": \"BPE\", \"vocab\": {}, \"merges\": []}, \"pre_tokenizer\": ";
    for (String json : new String[] {
      "{\"model\": {\"type\": \"Unigram\"}}", bpe + "null}", bpe + "{\"type\": \"Metaspace\"}}",
      bpe + "{\"type\": \"ByteLevel\"}, \"normalizer\": {\"type\": \"Lowercase\"}}"
    }) {
      LapilliException refused = assertThrows(LapilliException.class, () -> ByteLevelTokenizer.ofJson(json));
      assertEquals(LapilliException.Status.UNSUPPORTED, refused.status());
      assertTrue(refused.getMessage(), refused.getMessage().contains("Give LlmModule a Tokenizer of yours"));
    }
    for (String json : new String[] {"", "{", "[1, 2", "{\"model\": 3}", "{\"a\": \"\\u12", "nul", "{}"}) {
      LapilliException damaged = assertThrows(json, LapilliException.class, () -> ByteLevelTokenizer.ofJson(json));
      assertEquals(json, LapilliException.Status.INVALID_FILE, damaged.status());
    }
  }

  @Test
  public void writesWhatPythonWrites() {
    try (LlmModule module = load()) {
      assertEquals(96, module.context());
      Collector found = new Collector();
      assertEquals(0, module.generate(prompt(), promptTokens() + 24, found));
      assertEquals(answer(0).get("text"), found.text.toString());
      assertTrue(found.stats, found.stats.contains("\"prompt_tokens\":" + promptTokens() + ",\"generated_tokens\":"));
      long read = module.tokensRead();
      module.resetContext(); // the same again: the prompt is in the cache
      Collector again = new Collector();
      module.generate(prompt(), promptTokens() + 24, again);
      assertEquals(found.pieces, again.pieces);
      assertEquals(read - promptTokens() + 1, module.tokensRead() - read);
    }
  }

  /** The same draws as Python's with the same seed. */
  @Test
  public void drawsWhatPythonDraws() {
    try (LlmModule module = load()) {
      Map<?, ?> drawn = answer(1);
      module.setTemperature(((Number) drawn.get("temperature")).floatValue());
      module.setTopK(((Number) drawn.get("top_k")).intValue());
      module.setTopP(((Number) drawn.get("top_p")).floatValue());
      module.setMinP(((Number) drawn.get("min_p")).floatValue());
      module.setRepetitionPenalty(((Number) drawn.get("repetition_penalty")).floatValue());
      module.setSeed(7);
      Collector found = new Collector();
      module.generate(prompt(), promptTokens() + 24, found);
      assertEquals(drawn.get("text"), found.text.toString());
    }
  }

  /** A conversation in two calls is the same as one prompt of all of it. */
  @Test
  public void textsFollowEachOther() {
    try (LlmModule module = load();
        LlmModule whole = load()) {
      Collector first = new Collector(), second = new Collector(), other = new Collector();
      module.generate(prompt(), promptTokens() + 1, first);
      int before = promptTokens() + 1;
      module.generate(" in the", 20, second, true);
      assertEquals(" in the", second.pieces.get(0));
      whole.generate(prompt(), promptTokens() + 1, new Collector());
      long read = whole.tokensRead();
      whole.generate(" in the", 20, other);
      assertEquals(second.text.toString(), " in the" + other.text);
      assertTrue(whole.tokensRead() - read < before + 20);
    }
  }

  @Test
  public void stopsAndEndsWithTheContext() {
    try (LlmModule module = load()) {
      List<String> pieces = new ArrayList<>();
      module.generate(prompt(), 90, piece -> {
        pieces.add(piece);
        module.stop();
      });
      assertEquals(1, pieces.size());
      module.resetContext();
      Collector all = new Collector();
      module.generate(prompt(), Integer.MAX_VALUE, all); // ends with the context at the latest
      assertFalse(all.pieces.isEmpty());
      Collector none = new Collector();
      module.resetContext();
      module.generate(prompt(), 1, none); // no room beside the prompt
      assertEquals("", none.text.toString());
    }
  }

  @Test
  public void errors() {
    try (LlmModule module = load()) {
      List<String> told = new ArrayList<>();
      LlmCallback callback = new Collector() {
        @Override
        public void onError(int status, String message) {
          told.add(message);
        }
      };
      char[] many = new char[400];
      Arrays.fill(many, '!');
      LapilliException longer = assertThrows(LapilliException.class, () -> module.generate(new String(many), callback));
      assertTrue(longer.getMessage(), longer.getMessage().contains("it has 1 to 96, the model's context"));
      assertEquals(longer.getMessage(), told.get(0));
      module.resetContext();
      assertThrows(LapilliException.class, () -> module.generate("", callback)); // no token to go on from
      assertThrows(IllegalArgumentException.class, () -> module.setTemperature(Float.NaN));
      module.setTopP(2);
      LapilliException wrong = assertThrows(LapilliException.class, () -> module.generate("a", callback));
      assertTrue(wrong.getMessage(), wrong.getMessage().contains("top_p can be 0 to 1"));
    }
    LlmModule closed = load();
    closed.close();
    closed.close();
    assertThrows(IllegalStateException.class, () -> closed.generate("a", piece -> {}));
    LapilliException other = assertThrows(LapilliException.class, () -> new LlmModule(Models.path("net"), 0));
    assertTrue(other.getMessage(), other.getMessage().contains("no language model"));
  }

  @Test
  public void charactersAreWhole() {
    LlmModule.Utf8 utf8 = new LlmModule.Utf8();
    StringBuilder text = new StringBuilder();
    for (byte b : "aé世👩".getBytes(StandardCharsets.UTF_8)) text.append(utf8.take(new byte[] {b}));
    assertEquals("aé世👩", text.toString());
    assertEquals("", utf8.take(new byte[] {(byte) 0xe4, (byte) 0xb8}));
    assertEquals("\ufffd", utf8.rest());
  }

  /** ExecuTorch's names. */
  @Test
  public void executorch() throws Exception {
    org.pytorch.executorch.extension.llm.LlmModule module =
        new org.pytorch.executorch.extension.llm.LlmModule(Models.path("llm"), null, 0);
    assertEquals(0, module.load());
    StringBuilder text = new StringBuilder();
    module.generate(prompt(), promptTokens() + 24, text::append);
    assertEquals(answer(0).get("text"), text.toString());
    module.resetNative();
    String tokenizer = Models.FOLDER.resolve("llama/tokenizer.json").toString();
    module = new org.pytorch.executorch.extension.llm.LlmModule(1, Models.path("llm"), tokenizer, 0);
    StringBuilder again = new StringBuilder();
    module.generate(prompt(), promptTokens() + 24, again::append);
    assertEquals(text.toString(), again.toString());
    module.resetNative();
  }
}
