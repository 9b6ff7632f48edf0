package org.pytorch.executorch;

import java.nio.ByteBuffer;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.nio.ShortBuffer;

/** ExecuTorch's tensors: those of org.lapilli by another name. */
public final class Tensor {
  final org.lapilli.Tensor tensor;

  Tensor(org.lapilli.Tensor tensor) {
    this.tensor = tensor;
  }

  public static ByteBuffer allocateByteBuffer(int elements) {
    return org.lapilli.Tensor.allocateByteBuffer(elements);
  }

  public static ShortBuffer allocateShortBuffer(int elements) {
    return org.lapilli.Tensor.allocateShortBuffer(elements);
  }

  public static IntBuffer allocateIntBuffer(int elements) {
    return org.lapilli.Tensor.allocateIntBuffer(elements);
  }

  public static LongBuffer allocateLongBuffer(int elements) {
    return org.lapilli.Tensor.allocateLongBuffer(elements);
  }

  public static FloatBuffer allocateFloatBuffer(int elements) {
    return org.lapilli.Tensor.allocateFloatBuffer(elements);
  }

  public static DoubleBuffer allocateDoubleBuffer(int elements) {
    return org.lapilli.Tensor.allocateDoubleBuffer(elements);
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

  public long[] shape() {
    return tensor.shape();
  }

  public long numel() {
    return tensor.numel();
  }

  public static long numel(long[] shape) {
    return org.lapilli.Tensor.numel(shape);
  }

  public DType dtype() {
    return DType.of(tensor.dtype());
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
