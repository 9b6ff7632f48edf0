package org.lapilli;

/** Between text and tokens. LlmModule makes one of the file's own tokenizer, if it is of a kind that ByteLevelTokenizer knows. */
public interface Tokenizer {
  /** first: whether the text begins a sequence, so that what the model wants there is put before it. */
  int[] encode(String text, boolean first);

  /** The bytes of a token's text in UTF-8; none for special tokens. A character may be spread over several tokens. */
  byte[] decode(int token);
}
