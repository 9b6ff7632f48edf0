package org.pytorch.executorch.extension.llm;

/** As ExecuTorch has it. */
public interface LlmCallback extends org.lapilli.LlmCallback {}
