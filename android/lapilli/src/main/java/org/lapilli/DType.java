package org.lapilli;

/** The types of elements, with the numbers that the C ABI has for them. */
public enum DType {
  BOOL(1),
  UINT8(1),
  INT8(1),
  INT16(2),
  INT32(4),
  INT64(8),
  /** 16-bit floats: their bits are in a ShortBuffer, and getDataAsFloatArray converts them. */
  FLOAT16(2),
  BFLOAT16(2),
  FLOAT32(4),
  FLOAT64(8);

  /** Bytes of an element. */
  public final int bytes;

  private static final DType[] ALL = values();

  DType(int bytes) {
    this.bytes = bytes;
  }

  static DType of(long number) {
    return ALL[(int) number];
  }

  /** The name in Python: "float32". */
  @Override
  public String toString() {
    return name().toLowerCase(java.util.Locale.ROOT);
  }
}
