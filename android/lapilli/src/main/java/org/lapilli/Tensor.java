package org.lapilli;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.nio.ShortBuffer;
import java.util.Arrays;
import java.util.concurrent.atomic.AtomicLong;

/**
 * A dense tensor in a direct buffer, which is its memory: what is written into the buffer is in the tensor. The player reads and writes
 * that memory without a copy on the Java side.
 */
public final class Tensor {
  private static final AtomicLong ALLOCATED = new AtomicLong();

  private final Buffer buffer;
  private final DType dtype;
  private final long[] shape;
  private final long numel;
  private final MemoryFormat format;

  private Tensor(Buffer buffer, DType dtype, long[] shape, MemoryFormat format) {
    if (buffer == null) throw new IllegalArgumentException("The tensor's data is null.");
    this.numel = numel(shape);
    if (buffer.capacity() != numel)
      throw new IllegalArgumentException(
          "A tensor of shape " + Arrays.toString(shape) + " has " + numel + " elements, and the data has " + buffer.capacity() + ".");
    this.buffer = buffer;
    this.dtype = dtype;
    this.shape = shape.clone();
    this.format = format == null ? MemoryFormat.CONTIGUOUS : format;
  }

  /** The number of direct buffers that this class has allocated so far, in all threads. */
  public static long allocatedBuffers() {
    return ALLOCATED.get();
  }

  // -- memory

  private static ByteBuffer allocate(long elements, int bytes) {
    if (elements < 0 || elements > Integer.MAX_VALUE / bytes)
      throw new IllegalArgumentException(
          "A buffer of " + elements + " elements of " + bytes + " bytes was asked for; it may have 0.." + Integer.MAX_VALUE / bytes + ".");
    ALLOCATED.incrementAndGet();
    return ByteBuffer.allocateDirect((int) elements * bytes).order(ByteOrder.nativeOrder());
  }

  public static ByteBuffer allocateByteBuffer(int elements) {
    return allocate(elements, 1);
  }

  public static ShortBuffer allocateShortBuffer(int elements) {
    return allocate(elements, 2).asShortBuffer();
  }

  public static IntBuffer allocateIntBuffer(int elements) {
    return allocate(elements, 4).asIntBuffer();
  }

  public static LongBuffer allocateLongBuffer(int elements) {
    return allocate(elements, 8).asLongBuffer();
  }

  public static FloatBuffer allocateFloatBuffer(int elements) {
    return allocate(elements, 4).asFloatBuffer();
  }

  public static DoubleBuffer allocateDoubleBuffer(int elements) {
    return allocate(elements, 8).asDoubleBuffer();
  }

  private static Buffer allocate(DType dtype, long elements) {
    ByteBuffer memory = allocate(elements, dtype.bytes);
    switch (dtype) {
      case INT16:
      case FLOAT16:
      case BFLOAT16:
        return memory.asShortBuffer();
      case INT32:
        return memory.asIntBuffer();
      case INT64:
        return memory.asLongBuffer();
      case FLOAT32:
        return memory.asFloatBuffer();
      case FLOAT64:
        return memory.asDoubleBuffer();
      default:
        return memory;
    }
  }

  private static <B extends Buffer> B usable(B buffer, ByteOrder order) {
    if (buffer == null) throw new IllegalArgumentException("The tensor's data is null.");
    if (!buffer.isDirect())
      throw new IllegalArgumentException(
          "The buffer is not direct. Make it with Tensor.allocateFloatBuffer and the like, or give an array, which is copied.");
    if (order != ByteOrder.nativeOrder())
      throw new IllegalArgumentException("The buffer's byte order is " + order + "; call order(ByteOrder.nativeOrder()) before it is viewed.");
    return buffer;
  }

  /** A tensor of zeros. */
  public static Tensor zeros(long[] shape, DType dtype) {
    return new Tensor(allocate(dtype, numel(shape)), dtype, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor ones(long[] shape, DType dtype) {
    Tensor tensor = zeros(shape, dtype);
    for (int i = 0; i < tensor.numel; ++i) tensor.set(i, 1);
    return tensor;
  }

  /**
   * A tensor in a direct buffer. The kind of buffer fits the type: ByteBuffer for BOOL, UINT8 and INT8, ShortBuffer for INT16, FLOAT16
   * and BFLOAT16, and so on. Throws IllegalArgumentException if it does not, or has another number of elements.
   */
  public static Tensor fromBlob(Buffer data, DType dtype, long[] shape) {
    if (!kind(dtype).isInstance(data))
      throw new IllegalArgumentException("A tensor of " + dtype + " needs a direct " + kind(dtype).getSimpleName() + ".");
    return new Tensor(usable(data, order(data)), dtype, shape, MemoryFormat.CONTIGUOUS);
  }

  private static Class<? extends Buffer> kind(DType dtype) {
    switch (dtype) {
      case INT16:
      case FLOAT16:
      case BFLOAT16:
        return ShortBuffer.class;
      case INT32:
        return IntBuffer.class;
      case INT64:
        return LongBuffer.class;
      case FLOAT32:
        return FloatBuffer.class;
      case FLOAT64:
        return DoubleBuffer.class;
      default:
        return ByteBuffer.class;
    }
  }

  private static ByteOrder order(Buffer buffer) {
    if (buffer instanceof ByteBuffer) return ByteOrder.nativeOrder(); // single bytes have none
    if (buffer instanceof ShortBuffer) return ((ShortBuffer) buffer).order();
    if (buffer instanceof IntBuffer) return ((IntBuffer) buffer).order();
    if (buffer instanceof LongBuffer) return ((LongBuffer) buffer).order();
    if (buffer instanceof FloatBuffer) return ((FloatBuffer) buffer).order();
    return ((DoubleBuffer) buffer).order();
  }

  // -- int8

  public static Tensor fromBlob(ByteBuffer data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(ByteBuffer data, int[] shape) {
    return fromBlob(data, wide(shape));
  }

  public static Tensor fromBlob(ByteBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(usable(data, ByteOrder.nativeOrder()), DType.INT8, shape, format);
  }

  /** The data is copied. */
  public static Tensor fromBlob(byte[] data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(byte[] data, long[] shape, MemoryFormat format) {
    if (data == null) throw new IllegalArgumentException("The tensor's data is null.");
    ByteBuffer buffer = allocateByteBuffer(data.length);
    buffer.put(data).rewind();
    return new Tensor(buffer, DType.INT8, shape, format);
  }

  // -- int16

  public static Tensor fromBlob(ShortBuffer data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(ShortBuffer data, int[] shape) {
    return fromBlob(data, wide(shape));
  }

  public static Tensor fromBlob(ShortBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(usable(data, data == null ? null : data.order()), DType.INT16, shape, format);
  }

  /** The data is copied. */
  public static Tensor fromBlob(short[] data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(short[] data, long[] shape, MemoryFormat format) {
    if (data == null) throw new IllegalArgumentException("The tensor's data is null.");
    ShortBuffer buffer = allocateShortBuffer(data.length);
    buffer.put(data).rewind();
    return new Tensor(buffer, DType.INT16, shape, format);
  }

  // -- int32

  public static Tensor fromBlob(IntBuffer data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(IntBuffer data, int[] shape) {
    return fromBlob(data, wide(shape));
  }

  public static Tensor fromBlob(IntBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(usable(data, data == null ? null : data.order()), DType.INT32, shape, format);
  }

  /** The data is copied. */
  public static Tensor fromBlob(int[] data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(int[] data, long[] shape, MemoryFormat format) {
    if (data == null) throw new IllegalArgumentException("The tensor's data is null.");
    IntBuffer buffer = allocateIntBuffer(data.length);
    buffer.put(data).rewind();
    return new Tensor(buffer, DType.INT32, shape, format);
  }

  // -- int64

  public static Tensor fromBlob(LongBuffer data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(LongBuffer data, int[] shape) {
    return fromBlob(data, wide(shape));
  }

  public static Tensor fromBlob(LongBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(usable(data, data == null ? null : data.order()), DType.INT64, shape, format);
  }

  /** The data is copied. */
  public static Tensor fromBlob(long[] data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(long[] data, long[] shape, MemoryFormat format) {
    if (data == null) throw new IllegalArgumentException("The tensor's data is null.");
    LongBuffer buffer = allocateLongBuffer(data.length);
    buffer.put(data).rewind();
    return new Tensor(buffer, DType.INT64, shape, format);
  }

  // -- float32

  public static Tensor fromBlob(FloatBuffer data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(FloatBuffer data, int[] shape) {
    return fromBlob(data, wide(shape));
  }

  public static Tensor fromBlob(FloatBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(usable(data, data == null ? null : data.order()), DType.FLOAT32, shape, format);
  }

  /** The data is copied. */
  public static Tensor fromBlob(float[] data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(float[] data, long[] shape, MemoryFormat format) {
    if (data == null) throw new IllegalArgumentException("The tensor's data is null.");
    FloatBuffer buffer = allocateFloatBuffer(data.length);
    buffer.put(data).rewind();
    return new Tensor(buffer, DType.FLOAT32, shape, format);
  }

  // -- float64

  public static Tensor fromBlob(DoubleBuffer data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(DoubleBuffer data, int[] shape) {
    return fromBlob(data, wide(shape));
  }

  public static Tensor fromBlob(DoubleBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(usable(data, data == null ? null : data.order()), DType.FLOAT64, shape, format);
  }

  /** The data is copied. */
  public static Tensor fromBlob(double[] data, long[] shape) {
    return fromBlob(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlob(double[] data, long[] shape, MemoryFormat format) {
    if (data == null) throw new IllegalArgumentException("The tensor's data is null.");
    DoubleBuffer buffer = allocateDoubleBuffer(data.length);
    buffer.put(data).rewind();
    return new Tensor(buffer, DType.FLOAT64, shape, format);
  }

  // -- uint8

  public static Tensor fromBlobUnsigned(ByteBuffer data, long[] shape) {
    return fromBlobUnsigned(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlobUnsigned(ByteBuffer data, long[] shape, MemoryFormat format) {
    return new Tensor(usable(data, ByteOrder.nativeOrder()), DType.UINT8, shape, format);
  }

  /** The data is copied. */
  public static Tensor fromBlobUnsigned(byte[] data, long[] shape) {
    return fromBlobUnsigned(data, shape, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor fromBlobUnsigned(byte[] data, long[] shape, MemoryFormat format) {
    if (data == null) throw new IllegalArgumentException("The tensor's data is null.");
    ByteBuffer buffer = allocateByteBuffer(data.length);
    buffer.put(data).rewind();
    return new Tensor(buffer, DType.UINT8, shape, format);
  }

  // -- what it is

  public long[] shape() {
    return shape.clone();
  }

  public long numel() {
    return numel;
  }

  /** The number of elements of a shape. Throws IllegalArgumentException for a negative size, or more than memory has. */
  public static long numel(long[] shape) {
    if (shape == null) throw new IllegalArgumentException("The shape is null.");
    long elements = 1;
    boolean empty = false;
    for (long size : shape) {
      if (size < 0) throw new IllegalArgumentException("The shape " + Arrays.toString(shape) + " has a negative size.");
      empty |= size == 0;
    }
    for (long size : shape) {
      if (!empty && elements > Long.MAX_VALUE / size)
        throw new IllegalArgumentException("The shape " + Arrays.toString(shape) + " is larger than any memory.");
      elements *= empty ? 0 : size;
    }
    return elements;
  }

  private static long[] wide(int[] shape) {
    if (shape == null) throw new IllegalArgumentException("The shape is null.");
    long[] wide = new long[shape.length];
    for (int i = 0; i < shape.length; ++i) wide[i] = shape[i];
    return wide;
  }

  public DType dtype() {
    return dtype;
  }

  public MemoryFormat memoryFormat() {
    return format;
  }

  /** The memory itself, as the buffer that was given or the kind that fits the type. */
  public Buffer buffer() {
    return buffer;
  }

  /** Bytes of the memory. */
  public long bytes() {
    return numel * dtype.bytes;
  }

  long[] shapeItself() {
    return shape;
  }

  // -- elements

  private IllegalStateException not(String wanted) {
    return new IllegalStateException("The tensor is of " + dtype + ", and its data was asked for as " + wanted + ".");
  }

  private static Buffer rewound(Buffer duplicate) {
    return duplicate.clear();
  }

  /** BOOL (0 or 1) or INT8. */
  public byte[] getDataAsByteArray() {
    if (dtype != DType.INT8 && dtype != DType.BOOL) throw not("int8");
    return bytesOf();
  }

  public byte[] getDataAsUnsignedByteArray() {
    if (dtype != DType.UINT8) throw not("uint8");
    return bytesOf();
  }

  private byte[] bytesOf() {
    byte[] data = new byte[(int) numel];
    ((ByteBuffer) rewound(((ByteBuffer) buffer).duplicate())).get(data);
    return data;
  }

  public boolean[] getDataAsBooleanArray() {
    if (dtype != DType.BOOL) throw not("bool");
    boolean[] data = new boolean[(int) numel];
    for (int i = 0; i < data.length; ++i) data[i] = ((ByteBuffer) buffer).get(i) != 0;
    return data;
  }

  /** INT16, or the bits of FLOAT16 and BFLOAT16. */
  public short[] getDataAsShortArray() {
    if (dtype != DType.INT16 && dtype != DType.FLOAT16 && dtype != DType.BFLOAT16) throw not("int16");
    short[] data = new short[(int) numel];
    ((ShortBuffer) rewound(((ShortBuffer) buffer).duplicate())).get(data);
    return data;
  }

  public int[] getDataAsIntArray() {
    if (dtype != DType.INT32) throw not("int32");
    int[] data = new int[(int) numel];
    ((IntBuffer) rewound(((IntBuffer) buffer).duplicate())).get(data);
    return data;
  }

  public long[] getDataAsLongArray() {
    if (dtype != DType.INT64) throw not("int64");
    long[] data = new long[(int) numel];
    ((LongBuffer) rewound(((LongBuffer) buffer).duplicate())).get(data);
    return data;
  }

  /** FLOAT32, and FLOAT16 and BFLOAT16, which are converted. */
  public float[] getDataAsFloatArray() {
    float[] data = new float[(int) numel];
    readInto(data);
    return data;
  }

  /** As getDataAsFloatArray, into an array of numel() elements or more that exists. */
  public void readInto(float[] data) {
    if (data.length < numel)
      throw new IllegalArgumentException("The tensor has " + numel + " elements, and the array room for " + data.length + ".");
    int n = (int) numel;
    switch (dtype) {
      case FLOAT32:
        FloatBuffer floats = (FloatBuffer) buffer;
        for (int i = 0; i < n; ++i) data[i] = floats.get(i);
        break;
      case FLOAT16:
        for (int i = 0; i < n; ++i) data[i] = half(((ShortBuffer) buffer).get(i));
        break;
      case BFLOAT16:
        for (int i = 0; i < n; ++i) data[i] = Float.intBitsToFloat(((ShortBuffer) buffer).get(i) << 16);
        break;
      default:
        throw not("float32");
    }
  }

  private static float half(short bits) {
    int sign = (bits & 0x8000) << 16, low = bits & 0x7fff;
    if (low >= 0x7c00) return Float.intBitsToFloat(sign | 0x7f800000 | (low & 0x3ff) << 13);
    if (low >= 0x400) return Float.intBitsToFloat(sign | ((low << 13) + 0x38000000));
    return sign != 0 ? -low / 16777216f : low / 16777216f;
  }

  public double[] getDataAsDoubleArray() {
    if (dtype != DType.FLOAT64) throw not("float64");
    double[] data = new double[(int) numel];
    ((DoubleBuffer) rewound(((DoubleBuffer) buffer).duplicate())).get(data);
    return data;
  }

  private void set(int i, int value) {
    switch (dtype) {
      case INT16:
        ((ShortBuffer) buffer).put(i, (short) value);
        break;
      case FLOAT16:
        ((ShortBuffer) buffer).put(i, (short) (value == 0 ? 0 : 0x3c00)); // 0 or 1
        break;
      case BFLOAT16:
        ((ShortBuffer) buffer).put(i, (short) (Float.floatToIntBits(value) >> 16));
        break;
      case INT32:
        ((IntBuffer) buffer).put(i, value);
        break;
      case INT64:
        ((LongBuffer) buffer).put(i, value);
        break;
      case FLOAT32:
        ((FloatBuffer) buffer).put(i, value);
        break;
      case FLOAT64:
        ((DoubleBuffer) buffer).put(i, value);
        break;
      default:
        ((ByteBuffer) buffer).put(i, (byte) value);
    }
  }

  @Override
  public String toString() {
    return "Tensor(" + Arrays.toString(shape) + ", dtype=torch." + dtype + ")";
  }
}
