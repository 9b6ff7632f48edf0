package org.pytorch;

/** The types that PyTorch Mobile names, with its numbers; results of other types are read with org.lapilli. */
public enum DType {
  UINT8(1),
  INT8(2),
  INT32(3),
  FLOAT32(4),
  INT64(5),
  FLOAT64(6);

  public final int jniCode;

  DType(int jniCode) {
    this.jniCode = jniCode;
  }

  static DType of(org.lapilli.DType dtype) {
    for (DType one : values()) if (one.name().equals(dtype.name())) return one;
    throw new IllegalStateException("org.pytorch has no name for tensors of " + dtype + "; org.lapilli.Tensor has one.");
  }
}
