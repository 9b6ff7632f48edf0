package org.pytorch.executorch.extension.llm;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import org.lapilli.ByteLevelTokenizer;
import org.lapilli.Module;
import org.lapilli.Tokenizer;

/** A language model that lapilli.LLM saved, by ExecuTorch's names: see org.lapilli.LlmModule. */
public class LlmModule {
  public static final int MODEL_TYPE_TEXT = 1;

  private final String path;
  private final String tokenizerPath;
  private float temperature;
  private org.lapilli.LlmModule module;

  /** tokenizerPath: a tokenizer.json; null or empty: the one in the file. */
  public LlmModule(int modelType, String modulePath, String tokenizerPath, float temperature) {
    if (modelType != MODEL_TYPE_TEXT)
      throw new IllegalArgumentException("The model type is " + modelType + "; only MODEL_TYPE_TEXT (1) is there.");
    path = modulePath;
    this.tokenizerPath = tokenizerPath;
    this.temperature = temperature;
  }

  public LlmModule(String modulePath, String tokenizerPath, float temperature) {
    this(MODEL_TYPE_TEXT, modulePath, tokenizerPath, temperature);
  }

  /** Loads the model, which the first generate() does otherwise. Returns 0; failures are exceptions. */
  public synchronized int load() {
    if (module != null) return 0;
    Tokenizer tokenizer = null;
    if (tokenizerPath != null && !tokenizerPath.isEmpty())
      try {
        tokenizer = ByteLevelTokenizer.ofJson(new String(Files.readAllBytes(Paths.get(tokenizerPath)), StandardCharsets.UTF_8));
      } catch (IOException wrong) {
        throw new IllegalArgumentException("The tokenizer " + tokenizerPath + " cannot be read: " + wrong.getMessage(), wrong);
      }
    module = new org.lapilli.LlmModule(Module.load(path), tokenizer, temperature);
    return 0;
  }

  private synchronized org.lapilli.LlmModule loaded() {
    load();
    return module;
  }

  public int generate(String prompt, LlmCallback callback) {
    return loaded().generate(prompt, callback);
  }

  public int generate(String prompt, int seqLen, LlmCallback callback) {
    return loaded().generate(prompt, seqLen, callback);
  }

  public int generate(String prompt, LlmCallback callback, boolean echo) {
    return loaded().generate(prompt, org.lapilli.LlmModule.DEFAULT_SEQ_LEN, callback, echo);
  }

  public int generate(String prompt, int seqLen, LlmCallback callback, boolean echo) {
    return loaded().generate(prompt, seqLen, callback, echo);
  }

  public void stop() {
    loaded().stop();
  }

  public void resetContext() {
    loaded().resetContext();
  }

  /** Frees the model; the next call loads it again. */
  public synchronized void resetNative() {
    if (module != null) module.close();
    module = null;
  }
}
