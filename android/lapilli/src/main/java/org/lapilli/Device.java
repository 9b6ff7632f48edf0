package org.lapilli;

/** Where a module runs. */
public enum Device {
  /** A Vulkan driver that computes on the CPU, such as lavapipe or SwiftShader. */
  CPU,
  /** The best Vulkan device. */
  VULKAN;

  /** What a Vulkan device of this machine is. */
  public static final class Info {
    public final int index;
    public final String name;
    /** Name and version. */
    public final String driver;
    /** Of Vulkan: "1.3.290". */
    public final String apiVersion;
    public final boolean cpu;
    /** Of PCI. */
    public final int vendor;
    /** Bytes. */
    public final long memory;

    private Info(int index) {
      String[] texts = Native.device(index);
      long[] numbers = Native.deviceNumbers(index);
      this.index = index;
      name = texts[0];
      driver = texts[1];
      apiVersion = texts[2];
      cpu = numbers[0] == 4;
      vendor = (int) numbers[1];
      memory = numbers[2];
    }

    @Override
    public String toString() {
      return name;
    }
  }

  /** The Vulkan devices of this machine, best first. Throws LapilliException where there is no Vulkan. */
  public static Info[] all() {
    Info[] all = new Info[Native.deviceCount()];
    for (int i = 0; i < all.length; ++i) all[i] = new Info(i);
    return all;
  }

  /** Whether there is a Vulkan device. */
  public static boolean isVulkanAvailable() {
    try {
      return Native.deviceCount() > 0;
    } catch (LapilliException none) {
      return false;
    }
  }

  /** As the player takes it; null: the best, or the one that LAPILLI_DEVICE names. */
  String wanted() {
    if (this == VULKAN) return null;
    for (Info info : all()) if (info.cpu) return Integer.toString(info.index);
    throw new LapilliException(
        LapilliException.Status.NO_DEVICE,
        "Device.CPU was asked for, and no Vulkan driver of this machine computes on the CPU. Use Device.VULKAN.");
  }
}
