package org.pytorch;

public enum Device {
  CPU(1),
  VULKAN(2);

  public final int jniCode;

  Device(int jniCode) {
    this.jniCode = jniCode;
  }

  org.lapilli.Device lapilli() {
    return this == CPU ? org.lapilli.Device.CPU : org.lapilli.Device.VULKAN;
  }
}
