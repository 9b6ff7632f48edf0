package org.pytorch.executorch;

/** The types that ExecuTorch names, with its numbers. */
public enum DType {
  UINT8(0),
  INT8(1),
  INT16(2),
  INT32(3),
  INT64(4),
  HALF(5),
  FLOAT(6),
  DOUBLE(7),
  BOOL(11),
  BFLOAT16(15);

  public final int jniCode;

  DType(int jniCode) {
    this.jniCode = jniCode;
  }

  static DType of(org.lapilli.DType dtype) {
    switch (dtype) {
      case FLOAT16:
        return HALF;
      case FLOAT32:
        return FLOAT;
      case FLOAT64:
        return DOUBLE;
      default:
        return valueOf(dtype.name());
    }
  }

  org.lapilli.DType lapilli() {
    switch (this) {
      case HALF:
        return org.lapilli.DType.FLOAT16;
      case FLOAT:
        return org.lapilli.DType.FLOAT32;
      case DOUBLE:
        return org.lapilli.DType.FLOAT64;
      default:
        return org.lapilli.DType.valueOf(name());
    }
  }
}
