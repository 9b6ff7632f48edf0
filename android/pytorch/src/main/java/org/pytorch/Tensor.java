package org.pytorch;

import java.nio.ByteBuffer;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;

/** PyTorch Mobile's tensors: those of org.lapilli by another name. */
public final class Tensor {
  final org.lapilli.Tensor tensor;

  Tensor(org.lapilli.Tensor tensor) {
    this.tensor = tensor;
  }

  public static ByteBuffer allocateByteBuffer(int elements) {
    return org.lapilli.Tensor.allocateByteBuffer(elements);
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

  public MemoryFormat memoryFormat() {
    return MemoryFormat.of(tensor.memoryFormat());
  }

  public byte[] getDataAsByteArray() {
    return tensor.getDataAsByteArray();
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
