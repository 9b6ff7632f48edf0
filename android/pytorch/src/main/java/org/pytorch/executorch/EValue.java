package org.pytorch.executorch;

/** ExecuTorch's values: those of org.lapilli by another name. */
public final class EValue {
  final org.lapilli.EValue value;

  EValue(org.lapilli.EValue value) {
    this.value = value;
  }

  public static EValue optionalNone() {
    return new EValue(org.lapilli.EValue.optionalNone());
  }

  public static EValue from(Tensor value) {
    return new EValue(org.lapilli.EValue.from(value == null ? null : value.tensor));
  }

  public static EValue from(boolean value) {
    return new EValue(org.lapilli.EValue.from(value));
  }

  public static EValue from(long value) {
    return new EValue(org.lapilli.EValue.from(value));
  }

  public static EValue from(double value) {
    return new EValue(org.lapilli.EValue.from(value));
  }

  public static EValue from(String value) {
    return new EValue(org.lapilli.EValue.from(value));
  }

  public boolean isNone() {
    return value.isNone();
  }

  public boolean isTensor() {
    return value.isTensor();
  }

  public boolean isBool() {
    return value.isBool();
  }

  public boolean isInt() {
    return value.isInt();
  }

  public boolean isDouble() {
    return value.isDouble();
  }

  public boolean isString() {
    return value.isString();
  }

  public Tensor toTensor() {
    return new Tensor(value.toTensor());
  }

  public boolean toBool() {
    return value.toBool();
  }

  public long toInt() {
    return value.toInt();
  }

  public double toDouble() {
    return value.toDouble();
  }

  public String toStr() {
    return value.toStr();
  }

  @Override
  public String toString() {
    return value.toString();
  }
}
