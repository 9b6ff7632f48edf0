package org.lapilli;

/** An argument or result of a module, as ExecuTorch names it: a tensor, a number, a text or nothing. */
public final class EValue extends Value {
  private EValue(Object value) {
    super(value);
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

  public boolean isInt() {
    return value instanceof Long;
  }

  public long toInt() {
    return as(Long.class);
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
