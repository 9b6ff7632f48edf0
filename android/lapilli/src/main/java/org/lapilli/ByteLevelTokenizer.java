package org.lapilli;

import java.io.ByteArrayOutputStream;
import java.nio.charset.StandardCharsets;
import java.text.Normalizer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * Tokenizers of GPT-2's kind, which SmolLM, Llama 3 and Qwen have: byte pairs of bytes. Made of a tokenizer.json of Hugging Face's
 * tokenizers; other kinds (SentencePiece, as Llama 2 and Gemma have it) are refused with a sentence, and need a Tokenizer of the
 * caller's.
 */
public final class ByteLevelTokenizer implements Tokenizer {
  private static final String GPT2 = "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

  private final Map<String, Integer> vocabulary = new HashMap<>();
  private final Map<Long, Integer> ranks = new HashMap<>(); // of pairs of tokens
  private final Map<Long, Integer> merged = new HashMap<>();
  private final byte[][] bytes; // of each token
  private final int[] ofByte = new int[256];
  private final List<Pattern> cuts = new ArrayList<>();
  private final Map<String, Integer> added = new HashMap<>();
  private final Pattern addedPattern; // null: there are none
  private final boolean compose;
  private final boolean wholeWords;
  private final int[] begin;

  /** Throws LapilliException (UNSUPPORTED) where it is of another kind, (INVALID_FILE) where it is none. */
  public static ByteLevelTokenizer ofJson(String json) {
    try {
      return new ByteLevelTokenizer(map(Json.parse(json)));
    } catch (ClassCastException | NullPointerException | ArrayIndexOutOfBoundsException | java.util.regex.PatternSyntaxException wrong) {
      throw new LapilliException(LapilliException.Status.INVALID_FILE, "The tokenizer is damaged: " + wrong + ".");
    }
  }

  private ByteLevelTokenizer(Map<?, ?> json) {
    Map<?, ?> model = map(json.get("model"));
    if (model.get("type") != null && !"BPE".equals(model.get("type"))) throw refused("a model " + model.get("type"));
    if (Boolean.TRUE.equals(model.get("byte_fallback"))) throw refused("a model with byte_fallback");
    compose = isComposed(json.get("normalizer"));
    addCuts(json.get("pre_tokenizer"));
    wholeWords = Boolean.TRUE.equals(model.get("ignore_merges"));
    int most = 0;
    for (Map.Entry<?, ?> entry : map(model.get("vocab")).entrySet()) {
      vocabulary.put((String) entry.getKey(), number(entry.getValue()));
      most = Math.max(most, number(entry.getValue()));
    }
    List<?> tokens = json.get("added_tokens") == null ? new ArrayList<>() : (List<?>) json.get("added_tokens");
    for (Object token : tokens) most = Math.max(most, number(map(token).get("id")));
    if (most >= 1 << 24) throw refused("a token " + most);
    bytes = new byte[most + 1][];
    Arrays.fill(bytes, new byte[0]);
    int[] byteOf = new int[512];
    Arrays.fill(byteOf, -1);
    for (int b = 0, above = 256; b < 256; ++b) {
      boolean shown = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      int c = shown ? b : above++;
      byteOf[c] = b;
      Integer token = vocabulary.get(String.valueOf((char) c));
      ofByte[b] = token == null ? -1 : token;
    }
    for (Map.Entry<String, Integer> entry : vocabulary.entrySet()) bytes[entry.getValue()] = bytesOf(entry.getKey(), byteOf);
    int rank = 0;
    for (Object merge : (List<?>) model.get("merges")) {
      List<?> parts = merge instanceof String ? Arrays.asList(((String) merge).split(" ", 2)) : (List<?>) merge;
      String a = (String) parts.get(0), b = (String) parts.get(1);
      long pair = pair(vocabulary.get(a), vocabulary.get(b));
      ranks.putIfAbsent(pair, rank++);
      merged.putIfAbsent(pair, vocabulary.get(a + b));
    }
    List<String> names = new ArrayList<>();
    for (Object token : tokens) {
      Map<?, ?> of = map(token);
      for (String flag : new String[] {"lstrip", "rstrip", "single_word"})
        if (Boolean.TRUE.equals(of.get(flag))) throw refused("a token with " + flag);
      String content = (String) of.get("content");
      added.put(content, number(of.get("id")));
      bytes[number(of.get("id"))] = Boolean.TRUE.equals(of.get("special")) ? new byte[0] : content.getBytes(StandardCharsets.UTF_8);
      names.add(content);
    }
    names.sort((a, b) -> b.length() - a.length());
    StringBuilder any = new StringBuilder();
    for (String name : names) any.append(any.length() == 0 ? "" : "|").append(Pattern.quote(name));
    addedPattern = names.isEmpty() ? null : Pattern.compile(any.toString());
    List<Integer> first = new ArrayList<>();
    addFirst(json.get("post_processor"), first);
    begin = first.stream().mapToInt(i -> i).toArray();
  }

  private static LapilliException refused(String what) {
    return new LapilliException(
        LapilliException.Status.UNSUPPORTED,
        "The file's tokenizer has " + what + ", and ByteLevelTokenizer knows byte-level BPE alone. Give LlmModule a Tokenizer of yours.");
  }

  private static Map<?, ?> map(Object json) {
    return (Map<?, ?>) json;
  }

  private static int number(Object json) {
    return ((Number) json).intValue();
  }

  private static long pair(int a, int b) {
    return (long) a << 32 | b;
  }

  private static boolean isComposed(Object normalizer) {
    if (normalizer == null) return false;
    Map<?, ?> of = map(normalizer);
    if ("NFC".equals(of.get("type"))) return true;
    if (!"Sequence".equals(of.get("type"))) throw refused("a normalizer " + of.get("type"));
    boolean composed = false;
    for (Object part : (List<?>) of.get("normalizers")) composed |= isComposed(part);
    return composed;
  }

  private void addCuts(Object cut) {
    if (cut == null) throw refused("no pre-tokenizer");
    Map<?, ?> of = map(cut);
    String type = (String) of.get("type");
    if ("Sequence".equals(type)) {
      for (Object part : (List<?>) of.get("pretokenizers")) addCuts(part);
    } else if ("Split".equals(type)) {
      Object regex = map(of.get("pattern")).get("Regex");
      if (regex == null || !"Isolated".equals(of.get("behavior")) || Boolean.TRUE.equals(of.get("invert"))) throw refused("another Split");
      cuts.add(pattern((String) regex));
    } else if ("Digits".equals(type)) {
      cuts.add(pattern(Boolean.TRUE.equals(of.get("individual_digits")) ? "\\p{N}" : "\\p{N}+"));
    } else if ("ByteLevel".equals(type)) {
      if (Boolean.TRUE.equals(of.get("add_prefix_space"))) throw refused("add_prefix_space");
      if (!Boolean.FALSE.equals(of.get("use_regex"))) cuts.add(pattern(GPT2));
    } else throw refused("a pre-tokenizer " + type);
  }

  private static Pattern pattern(String regex) {
    try {
      return Pattern.compile(regex, Pattern.UNICODE_CHARACTER_CLASS);
    } catch (IllegalArgumentException android) { // whose classes are always those of Unicode, and which refuses the flag
      return Pattern.compile(regex);
    }
  }

  private static void addFirst(Object processor, List<Integer> tokens) {
    if (processor == null) return;
    Map<?, ?> of = map(processor);
    String type = (String) of.get("type");
    if ("Sequence".equals(type)) {
      for (Object part : (List<?>) of.get("processors")) addFirst(part, tokens);
    } else if ("TemplateProcessing".equals(type)) {
      boolean before = true;
      for (Object part : (List<?>) of.get("single")) {
        Object special = map(part).get("SpecialToken");
        if (special == null) before = false;
        else if (!before) throw refused("tokens at the end of a text");
        else
          for (Object id : (List<?>) map(map(of.get("special_tokens")).get(map(special).get("id"))).get("ids")) tokens.add(number(id));
      }
    } else if (!"ByteLevel".equals(type)) throw refused("a post-processor " + type);
  }

  /** The bytes of a token of the vocabulary, each of which is a character there. */
  private static byte[] bytesOf(String token, int[] byteOf) {
    ByteArrayOutputStream out = new ByteArrayOutputStream();
    for (char c : token.toCharArray()) {
      if (c >= byteOf.length || byteOf[c] < 0) return token.getBytes(StandardCharsets.UTF_8);
      out.write(byteOf[c]);
    }
    return out.toByteArray();
  }

  @Override
  public int[] encode(String text, boolean first) {
    List<Integer> out = new ArrayList<>();
    if (first) for (int token : begin) out.add(token);
    int at = 0;
    if (addedPattern != null)
      for (Matcher found = addedPattern.matcher(text); found.find(); at = found.end()) {
        addText(text.substring(at, found.start()), out);
        out.add(added.get(found.group()));
      }
    addText(text.substring(at), out);
    return out.stream().mapToInt(i -> i).toArray();
  }

  private void addText(String text, List<Integer> out) {
    List<String> parts = new ArrayList<>();
    if (!text.isEmpty()) parts.add(compose ? Normalizer.normalize(text, Normalizer.Form.NFC) : text);
    for (Pattern cut : cuts) {
      List<String> finer = new ArrayList<>();
      for (String part : parts) {
        int at = 0;
        for (Matcher found = cut.matcher(part); found.find(); at = found.end()) {
          if (found.start() > at) finer.add(part.substring(at, found.start()));
          if (found.end() > found.start()) finer.add(found.group());
        }
        if (at < part.length()) finer.add(part.substring(at));
      }
      parts = finer;
    }
    for (String part : parts) addWord(part.getBytes(StandardCharsets.UTF_8), out);
  }

  private void addWord(byte[] word, List<Integer> out) {
    int count = 0;
    int[] tokens = new int[word.length];
    for (byte b : word) if (ofByte[b & 0xff] >= 0) tokens[count++] = ofByte[b & 0xff]; // else the model does not know it
    if (wholeWords) {
      StringBuilder name = new StringBuilder();
      for (byte b : word) name.append(nameOf(b & 0xff));
      Integer whole = vocabulary.get(name.toString());
      if (whole != null) {
        out.add(whole);
        return;
      }
    }
    while (count > 1) {
      int best = Integer.MAX_VALUE;
      int where = -1;
      for (int i = 0; i + 1 < count; ++i) {
        Integer rank = ranks.get(pair(tokens[i], tokens[i + 1]));
        if (rank != null && rank < best) {
          best = rank;
          where = i;
        }
      }
      if (where < 0) break;
      tokens[where] = merged.get(pair(tokens[where], tokens[where + 1]));
      System.arraycopy(tokens, where + 2, tokens, where + 1, count - where - 2);
      --count;
    }
    for (int i = 0; i < count; ++i) out.add(tokens[i]);
  }

  private static char nameOf(int b) {
    if ((b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae) return (char) b;
    return (char) (256 + (b <= ' ' ? b : b <= 0xa0 ? b - 127 + 33 : 67));
  }

  @Override
  public byte[] decode(int token) {
    return token >= 0 && token < bytes.length ? bytes[token].clone() : new byte[0];
  }
}
