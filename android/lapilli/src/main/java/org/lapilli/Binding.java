package org.lapilli;

import java.nio.Buffer;

/**
 * A run of one method on tensors that stay the same: their memory is looked up and checked once, and run() allocates nothing. Fill the
 * inputs' buffers, call run(), read the outputs' buffers.
 *
 * <p>Calls from several threads run one after another. Close it, or leave it to the garbage collector.
 */
public final class Binding implements AutoCloseable {
  final Tensor[] inputs; // kept: C++ has their addresses
  final int method;
  private final Handle module;
  private final Module owner; // kept
  private final Handle binding;
  private Tensor[] outputs;

  Binding(Module owner, Handle module, int method, Tensor[] inputs) {
    this.owner = owner;
    this.module = module;
    this.method = method;
    this.inputs = inputs.clone();
    Buffer[] buffers = new Buffer[inputs.length];
    int words = 0;
    for (int i = 0; i < inputs.length; ++i) {
      if (inputs[i] == null) throw new IllegalArgumentException("Input " + i + " is null.");
      if (inputs[i].memoryFormat() != MemoryFormat.CONTIGUOUS)
        throw new IllegalArgumentException(
            "Input " + i + " is " + inputs[i].memoryFormat() + ", and programs take CONTIGUOUS tensors. Give it in that order, or compile"
                + " the model with a permute of its input.");
      buffers[i] = inputs[i].buffer();
      words += 3 + inputs[i].shapeItself().length;
    }
    long[] tensors = new long[words];
    int at = 0;
    for (Tensor input : inputs) {
      tensors[at++] = input.dtype().ordinal();
      tensors[at++] = input.bytes();
      tensors[at++] = input.shapeItself().length;
      for (long size : input.shapeItself()) tensors[at++] = size;
    }
    long program = module.enter();
    try {
      binding = Handle.of(this, Native.bind(program, method, buffers, tensors), "Binding", Native::unbind);
    } finally {
      module.exit();
    }
  }

  /** New tensors for the outputs. */
  synchronized Tensor[] attachNew() {
    long at = binding.enter();
    try {
      long[] words = Native.outputs(at);
      int count = 0;
      for (int i = 0; i < words.length; i += 3 + (int) words[i + 2]) ++count;
      Tensor[] made = new Tensor[count];
      for (int i = 0, output = 0; output < count; i += 3 + (int) words[i + 2]) {
        long[] shape = new long[(int) words[i + 2]];
        System.arraycopy(words, i + 3, shape, 0, shape.length);
        made[output++] = Tensor.zeros(shape, DType.of(words[i]));
      }
      attach(at, made);
      return made;
    } finally {
      binding.exit();
    }
  }

  private void attach(long at, Tensor[] tensors) {
    Buffer[] buffers = new Buffer[tensors.length];
    for (int i = 0; i < tensors.length; ++i) buffers[i] = tensors[i].buffer();
    Native.attach(at, buffers);
    outputs = tensors;
  }

  /** Runs the method on what the inputs' buffers hold, and returns when the outputs' buffers have the results. */
  public synchronized void run() {
    long program = module.enter();
    try {
      long at = binding.enter();
      try {
        Native.run(program, at);
      } finally {
        binding.exit();
      }
    } finally {
      module.exit();
    }
  }

  /** New outputs and a run, as one step for other threads. */
  synchronized Tensor[] runToNew() {
    Tensor[] made = attachNew();
    run();
    return made;
  }

  /** The tensors that every run writes. */
  public synchronized Tensor[] outputs() {
    return outputs.clone();
  }

  boolean fits(int wanted, Tensor[] tensors) {
    if (method != wanted || inputs.length != tensors.length) return false;
    for (int i = 0; i < tensors.length; ++i) if (inputs[i] != tensors[i]) return false;
    return true;
  }

  public Module module() {
    return owner;
  }

  @Override
  public void close() {
    binding.close();
  }
}
