package org.lapilli;

import java.util.Locale;

/** An argument or result of a module, as ExecuTorch names it: a tensor, a number, a text or nothing. */
public final class EValue {
  private final Object value; // Tensor, Boolean, Long, Double, String or null

  private EValue(Object value) {
    this.value = value;
  }

  public static EValue optionalNone() {
    return new EValue(null);
  }

  public static EValue from(Tensor value) {
    if (value == null) throw new IllegalArgumentException("The tensor is null; use EValue.optionalNone().");
    return new EValue(value);
  }

  public static EValue from(boolean value) {
    return new EValue(value);
  }

  public static EValue from(long value) {
    return new EValue(value);
  }

  public static EValue from(double value) {
    return new EValue(value);
  }

  public static EValue from(String value) {
    if (value == null) throw new IllegalArgumentException("The text is null; use EValue.optionalNone().");
    return new EValue(value);
  }

  public boolean isNone() {
    return value == null;
  }

  public boolean isTensor() {
    return value instanceof Tensor;
  }

  public boolean isBool() {
    return value instanceof Boolean;
  }

  public boolean isInt() {
    return value instanceof Long;
  }

  public boolean isDouble() {
    return value instanceof Double;
  }

  public boolean isString() {
    return value instanceof String;
  }

  public Tensor toTensor() {
    return as(Tensor.class);
  }

  public boolean toBool() {
    return as(Boolean.class);
  }

  public long toInt() {
    return as(Long.class);
  }

  public double toDouble() {
    return as(Double.class);
  }

  public String toStr() {
    return as(String.class);
  }

  private <T> T as(Class<T> wanted) {
    if (!wanted.isInstance(value)) throw new IllegalStateException("The value is " + text() + ", not a " + wanted.getSimpleName().toLowerCase(Locale.ROOT) + ".");
    return wanted.cast(value);
  }

  private String text() {
    return value == null ? "none" : "a " + value.getClass().getSimpleName().toLowerCase(Locale.ROOT);
  }

  IValue asIValue() {
    if (value == null) return IValue.optionalNull();
    if (value instanceof Tensor) return IValue.from((Tensor) value);
    if (value instanceof Boolean) return IValue.from((boolean) (Boolean) value);
    if (value instanceof Long) return IValue.from((long) (Long) value);
    if (value instanceof Double) return IValue.from((double) (Double) value);
    return IValue.from((String) value);
  }

  @Override
  public String toString() {
    return String.valueOf(value);
  }
}
