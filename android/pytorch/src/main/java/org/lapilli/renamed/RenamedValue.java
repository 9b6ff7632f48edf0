package org.lapilli.renamed;

import org.lapilli.Value;

/** What the values of org.pytorch and org.pytorch.executorch have in common: one of org.lapilli behind another name. */
public abstract class RenamedValue {
  private final Value value;

  protected RenamedValue(Value value) {
    this.value = value;
  }

  public final boolean isTensor() {
    return value.isTensor();
  }

  public final boolean isBool() {
    return value.isBool();
  }

  public final boolean isDouble() {
    return value.isDouble();
  }

  public final boolean isString() {
    return value.isString();
  }

  public final boolean toBool() {
    return value.toBool();
  }

  public final double toDouble() {
    return value.toDouble();
  }

  public final String toStr() {
    return value.toStr();
  }

  @Override
  public final String toString() {
    return value.toString();
  }
}
