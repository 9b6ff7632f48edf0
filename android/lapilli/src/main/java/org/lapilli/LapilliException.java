package org.lapilli;

/** A failure in the player. Its message says what was given, what is accepted and what to do. */
public final class LapilliException extends RuntimeException {
  private static final long serialVersionUID = 1;

  /** As in lapilli.h, in its order. */
  public enum Status {
    OK,
    INVALID_ARGUMENT,
    INVALID_FILE,
    IO_ERROR,
    NO_DRIVER,
    NO_DEVICE,
    OUT_OF_MEMORY,
    DEVICE_LOST,
    TIMEOUT,
    INTERNAL,
    UNSUPPORTED,
    OUT_OF_RANGE
  }

  private final Status status;

  LapilliException(int code, String message) { // called from C++
    this(code >= 0 && code < Status.values().length ? Status.values()[code] : Status.INTERNAL, message);
  }

  LapilliException(Status status, String message) {
    super(message);
    this.status = status;
  }

  public Status status() {
    return status;
  }
}
