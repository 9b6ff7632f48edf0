package org.lapilli;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.util.HashMap;
import org.junit.Test;

/** Tensors and values; no device. */
public class TensorTest {
  @Test
  public void arraysAreCopiedAndBuffersAreNot() {
    float[] data = {1, 2, 3, 4, 5, 6};
    Tensor copy = Tensor.fromBlob(data, new long[] {2, 3});
    data[0] = 9;
    assertArrayEquals(new float[] {1, 2, 3, 4, 5, 6}, copy.getDataAsFloatArray(), 0);
    FloatBuffer buffer = Tensor.allocateFloatBuffer(6);
    Tensor shared = Tensor.fromBlob(buffer, new long[] {6});
    buffer.put(0, 7).position(3);
    assertArrayEquals(new float[] {7, 0, 0, 0, 0, 0}, shared.getDataAsFloatArray(), 0);
    assertEquals(3, buffer.position()); // reading moves nothing
    assertEquals("Tensor([2, 3], dtype=torch.float32)", copy.toString());
  }

  @Test
  public void allTypes() {
    long[] shape = {2};
    assertArrayEquals(new byte[] {1, -1}, Tensor.fromBlob(new byte[] {1, -1}, shape).getDataAsByteArray());
    assertArrayEquals(new byte[] {1, -1}, Tensor.fromBlobUnsigned(new byte[] {1, -1}, shape).getDataAsUnsignedByteArray());
    assertArrayEquals(new short[] {1, -1}, Tensor.fromBlob(new short[] {1, -1}, shape).getDataAsShortArray());
    assertArrayEquals(new int[] {1, -1}, Tensor.fromBlob(new int[] {1, -1}, shape).getDataAsIntArray());
    assertArrayEquals(new long[] {1, -1}, Tensor.fromBlob(new long[] {1, -1}, shape).getDataAsLongArray());
    assertArrayEquals(new double[] {1, -1}, Tensor.fromBlob(new double[] {1, -1}, shape).getDataAsDoubleArray(), 0);
    for (DType dtype : DType.values()) {
      assertEquals(2 * dtype.bytes, Tensor.zeros(shape, dtype).bytes());
      Tensor ones = Tensor.ones(shape, dtype);
      assertEquals(dtype, ones.dtype());
      if (dtype == DType.FLOAT16 || dtype == DType.BFLOAT16 || dtype == DType.FLOAT32)
        assertArrayEquals(new float[] {1, 1}, ones.getDataAsFloatArray(), 0);
      else assertThrows(IllegalStateException.class, ones::getDataAsFloatArray);
    }
    assertArrayEquals(new boolean[] {true, true}, Tensor.ones(shape, DType.BOOL).getDataAsBooleanArray());
    assertEquals(1, Tensor.zeros(new long[0], DType.INT64).numel());
    assertEquals(0, Tensor.zeros(new long[] {3, 0, 5}, DType.INT64).numel());
  }

  @Test
  public void allHalfFloats() { // against a conversion by arithmetic
    Tensor tensor = Tensor.zeros(new long[] {1 << 16}, DType.FLOAT16);
    for (int i = 0; i < 1 << 16; ++i) ((java.nio.ShortBuffer) tensor.buffer()).put(i, (short) i);
    float[] got = tensor.getDataAsFloatArray();
    for (int i = 0; i < 1 << 16; ++i) {
      int exponent = i >> 10 & 31, mantissa = i & 1023;
      double want =
          exponent == 31
              ? mantissa == 0 ? Double.POSITIVE_INFINITY : Double.NaN
              : exponent == 0 ? mantissa * Math.pow(2, -24) : (1 + mantissa / 1024.0) * Math.pow(2, exponent - 15);
      assertEquals(i >> 15 == 0 ? want : -want, got[i], 0);
    }
  }

  @Test
  public void wrongArguments() {
    assertThrows(IllegalArgumentException.class, () -> Tensor.fromBlob(new float[5], new long[] {2, 3}));
    assertThrows(IllegalArgumentException.class, () -> Tensor.fromBlob(new float[6], new long[] {-2, -3}));
    assertThrows(IllegalArgumentException.class, () -> Tensor.fromBlob((float[]) null, new long[] {1}));
    assertThrows(IllegalArgumentException.class, () -> Tensor.fromBlob((FloatBuffer) null, new long[] {1}));
    assertThrows(IllegalArgumentException.class, () -> Tensor.fromBlob(new float[1], (long[]) null));
    assertThrows(IllegalArgumentException.class, () -> Tensor.fromBlob(FloatBuffer.allocate(6), new long[] {6})); // not direct
    FloatBuffer bigEndian = ByteBuffer.allocateDirect(24).asFloatBuffer();
    assertThrows(IllegalArgumentException.class, () -> Tensor.fromBlob(bigEndian, new long[] {6}));
    assertThrows(IllegalArgumentException.class, () -> Tensor.fromBlob(Tensor.allocateIntBuffer(2), DType.FLOAT32, new long[] {2}));
    assertThrows(IllegalArgumentException.class, () -> Tensor.allocateFloatBuffer(-1));
    assertThrows(IllegalArgumentException.class, () -> Tensor.zeros(new long[] {1L << 32, 1L << 32}, DType.INT8));
    assertThrows(IllegalArgumentException.class, () -> Tensor.zeros(new long[] {1L << 31}, DType.INT8));
  }

  @Test
  public void values() {
    assertTrue(IValue.optionalNull().isNull());
    assertEquals(3, IValue.from(3L).toLong());
    assertEquals("x", IValue.from("x").toStr());
    assertArrayEquals(new double[] {1, 2}, IValue.listFrom(1.0, 2.0).toDoubleList(), 0);
    assertEquals(2, IValue.tupleFrom(IValue.from(true), IValue.from(1L)).toTuple().length);
    for (Value three : new Value[] {IValue.from(3L), EValue.from(3L)}) {
      IllegalStateException failed = assertThrows(IllegalStateException.class, three::toTensor);
      assertEquals("The value is a long, not a tensor.", failed.getMessage());
    }
    assertThrows(IllegalArgumentException.class, () -> IValue.listFrom(IValue.from(1L), IValue.from(true)));
    assertThrows(IllegalArgumentException.class, () -> IValue.from((Tensor) null));
    assertTrue(IValue.dictLongKeyFrom(new HashMap<>()).isDictLongKey());
    assertTrue(EValue.optionalNone().isNone());
    assertThrows(IllegalStateException.class, () -> EValue.from(1L).toBool());
  }
}
