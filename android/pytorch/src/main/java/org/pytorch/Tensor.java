package org.pytorch;

import java.nio.ByteBuffer;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import org.lapilli.renamed.RenamedTensor;

/** PyTorch Mobile's tensors: those of org.lapilli by another name. */
public final class Tensor extends RenamedTensor {
  final org.lapilli.Tensor tensor;

  Tensor(org.lapilli.Tensor tensor) {
    super(tensor);
    this.tensor = tensor;
  }

  public static Tensor fromBlob(ByteBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(ByteBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  /** The shape as PyTorch's Vulkan tutorial writes it. */
  public static Tensor fromBlob(ByteBuffer data, int[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(byte[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(byte[] data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  public static Tensor fromBlob(IntBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(IntBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  /** The shape as PyTorch's Vulkan tutorial writes it. */
  public static Tensor fromBlob(IntBuffer data, int[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(int[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(int[] data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  public static Tensor fromBlob(LongBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(LongBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  /** The shape as PyTorch's Vulkan tutorial writes it. */
  public static Tensor fromBlob(LongBuffer data, int[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(long[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(long[] data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  public static Tensor fromBlob(FloatBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(FloatBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  /** The shape as PyTorch's Vulkan tutorial writes it. */
  public static Tensor fromBlob(FloatBuffer data, int[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(float[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(float[] data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  public static Tensor fromBlob(DoubleBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(DoubleBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  /** The shape as PyTorch's Vulkan tutorial writes it. */
  public static Tensor fromBlob(DoubleBuffer data, int[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(double[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(double[] data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape, format.lapilli()));
  }

  public static Tensor fromBlobUnsigned(ByteBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlobUnsigned(data, shape));
  }

  public static Tensor fromBlobUnsigned(ByteBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlobUnsigned(data, shape, format.lapilli()));
  }

  public static Tensor fromBlobUnsigned(byte[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlobUnsigned(data, shape));
  }

  public static Tensor fromBlobUnsigned(byte[] data, long[] shape, MemoryFormat format) {
    return new Tensor(org.lapilli.Tensor.fromBlobUnsigned(data, shape, format.lapilli()));
  }

  public DType dtype() {
    return DType.of(tensor.dtype());
  }

  public MemoryFormat memoryFormat() {
    return MemoryFormat.of(tensor.memoryFormat());
  }
}
