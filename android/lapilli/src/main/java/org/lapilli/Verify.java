package org.lapilli;

/** What loading a module verifies. */
public enum Verify {
  /** The file: its checksum, structure and kernels. Always done. */
  STRUCTURE,
  /**
   * The device, too: once for each file and driver (Module.setCacheDir keeps what was found), random inputs are run by the best plan and
   * by the plainest one. Where results differ, the latter is taken, and Module.warning() says so; LapilliException of status NO_DEVICE
   * where what the device computes is not repeatable.
   */
  FIRST_RUN
}
