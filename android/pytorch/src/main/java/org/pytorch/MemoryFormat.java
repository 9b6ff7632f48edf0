package org.pytorch;

public enum MemoryFormat {
  CONTIGUOUS(1),
  CHANNELS_LAST(2),
  CHANNELS_LAST_3D(3);

  public final int jniCode;

  MemoryFormat(int jniCode) {
    this.jniCode = jniCode;
  }

  static MemoryFormat of(org.lapilli.MemoryFormat format) {
    return valueOf(format.name());
  }

  org.lapilli.MemoryFormat lapilli() {
    return org.lapilli.MemoryFormat.valueOf(name());
  }
}
