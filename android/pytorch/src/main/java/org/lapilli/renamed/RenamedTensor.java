package org.lapilli.renamed;

import java.nio.ByteBuffer;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.nio.ShortBuffer;
import org.lapilli.Tensor;

/** What the tensors of org.pytorch and org.pytorch.executorch have in common: one of org.lapilli behind another name. */
public abstract class RenamedTensor {
  private final Tensor tensor;

  protected RenamedTensor(Tensor tensor) {
    this.tensor = tensor;
  }

  public static ByteBuffer allocateByteBuffer(int elements) {
    return Tensor.allocateByteBuffer(elements);
  }

  public static ShortBuffer allocateShortBuffer(int elements) {
    return Tensor.allocateShortBuffer(elements);
  }

  public static IntBuffer allocateIntBuffer(int elements) {
    return Tensor.allocateIntBuffer(elements);
  }

  public static LongBuffer allocateLongBuffer(int elements) {
    return Tensor.allocateLongBuffer(elements);
  }

  public static FloatBuffer allocateFloatBuffer(int elements) {
    return Tensor.allocateFloatBuffer(elements);
  }

  public static DoubleBuffer allocateDoubleBuffer(int elements) {
    return Tensor.allocateDoubleBuffer(elements);
  }

  public long[] shape() {
    return tensor.shape();
  }

  public long numel() {
    return tensor.numel();
  }

  public static long numel(long[] shape) {
    return Tensor.numel(shape);
  }

  public byte[] getDataAsByteArray() {
    return tensor.getDataAsByteArray();
  }

  public short[] getDataAsShortArray() {
    return tensor.getDataAsShortArray();
  }

  public int[] getDataAsIntArray() {
    return tensor.getDataAsIntArray();
  }

  public long[] getDataAsLongArray() {
    return tensor.getDataAsLongArray();
  }

  public float[] getDataAsFloatArray() {
    return tensor.getDataAsFloatArray();
  }

  public double[] getDataAsDoubleArray() {
    return tensor.getDataAsDoubleArray();
  }

  public byte[] getDataAsUnsignedByteArray() {
    return tensor.getDataAsUnsignedByteArray();
  }

  @Override
  public String toString() {
    return tensor.toString();
  }
}
