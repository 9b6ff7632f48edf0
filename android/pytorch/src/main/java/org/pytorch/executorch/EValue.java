package org.pytorch.executorch;

import org.lapilli.renamed.RenamedValue;

/** ExecuTorch's values: those of org.lapilli by another name. */
public final class EValue extends RenamedValue {
  final org.lapilli.EValue value;

  EValue(org.lapilli.EValue value) {
    super(value);
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

  public boolean isInt() {
    return value.isInt();
  }

  public Tensor toTensor() {
    return new Tensor(value.toTensor());
  }

  public long toInt() {
    return value.toInt();
  }
}
