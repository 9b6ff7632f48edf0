package org.pytorch.executorch;

import java.nio.ByteBuffer;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.nio.ShortBuffer;
import org.lapilli.renamed.RenamedTensor;

/** ExecuTorch's tensors: those of org.lapilli by another name. */
public final class Tensor extends RenamedTensor {
  final org.lapilli.Tensor tensor;

  Tensor(org.lapilli.Tensor tensor) {
    super(tensor);
    this.tensor = tensor;
  }

  public static Tensor fromBlob(ByteBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(byte[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(ShortBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(short[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(IntBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(int[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(LongBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(long[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(FloatBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(float[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(DoubleBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlob(double[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlob(data, shape));
  }

  public static Tensor fromBlobUnsigned(ByteBuffer data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlobUnsigned(data, shape));
  }

  public static Tensor fromBlobUnsigned(byte[] data, long[] shape) {
    return new Tensor(org.lapilli.Tensor.fromBlobUnsigned(data, shape));
  }

  public static Tensor ones(long[] shape, DType dtype) {
    return new Tensor(org.lapilli.Tensor.ones(shape, dtype.lapilli()));
  }

  public static Tensor zeros(long[] shape, DType dtype) {
    return new Tensor(org.lapilli.Tensor.zeros(shape, dtype.lapilli()));
  }

  public DType dtype() {
    return DType.of(tensor.dtype());
  }
}
