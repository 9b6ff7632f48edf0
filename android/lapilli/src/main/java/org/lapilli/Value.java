package org.lapilli;

import java.util.Locale;

/** What IValue and EValue, PyTorch Mobile's and ExecuTorch's values, have in common: an object, and what it is asked for as. */
public abstract class Value {
  final Object value; // Tensor, Boolean, Long, Double, String, what an IValue holds besides, or null

  Value(Object value) {
    this.value = value;
  }

  public boolean isTensor() {
    return value instanceof Tensor;
  }

  public boolean isBool() {
    return value instanceof Boolean;
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

  public double toDouble() {
    return as(Double.class);
  }

  public String toStr() {
    return as(String.class);
  }

  final <T> T as(Class<T> wanted) {
    if (!wanted.isInstance(value)) throw isNot("a " + wanted.getSimpleName().toLowerCase(Locale.ROOT));
    return wanted.cast(value);
  }

  final IllegalStateException isNot(String wanted) {
    return new IllegalStateException("The value is " + text() + ", not " + wanted + ".");
  }

  /** What it is, for messages. */
  String text() {
    return value == null ? "none" : "a " + value.getClass().getSimpleName().toLowerCase(Locale.ROOT);
  }
}
