package org.lapilli;

/** What LlmModule.generate tells, on the thread that called it. */
public interface LlmCallback {
  /** The next piece of the text: whole characters. */
  void onResult(String result);

  /** At the end, as JSON: prompt_tokens, generated_tokens, and milliseconds since 1970 when each part began and ended. */
  default void onStats(String stats) {}

  /** A failure, which generate throws afterwards. */
  default void onError(int status, String message) {}
}
