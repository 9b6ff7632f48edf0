package org.lapilli;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;

/** An argument or result of a module: a tensor, a number, a text, or a list, tuple or dict of such values. */
public final class IValue extends Value {
  private enum Kind {
    NULL,
    TENSOR,
    BOOL,
    LONG,
    DOUBLE,
    STRING,
    TUPLE,
    BOOL_LIST,
    LONG_LIST,
    DOUBLE_LIST,
    TENSOR_LIST,
    LIST,
    DICT_STRING_KEY,
    DICT_LONG_KEY
  }

  private final Kind kind;

  private IValue(Kind kind, Object value) {
    super(value);
    if (value == null && kind != Kind.NULL) throw new IllegalArgumentException("A value of null was given; use IValue.optionalNull().");
    this.kind = kind;
  }

  public static IValue optionalNull() {
    return new IValue(Kind.NULL, null);
  }

  public static IValue from(Tensor tensor) {
    return new IValue(Kind.TENSOR, tensor);
  }

  public static IValue from(boolean value) {
    return new IValue(Kind.BOOL, value);
  }

  public static IValue from(long value) {
    return new IValue(Kind.LONG, value);
  }

  public static IValue from(double value) {
    return new IValue(Kind.DOUBLE, value);
  }

  public static IValue from(String value) {
    return new IValue(Kind.STRING, value);
  }

  public static IValue listFrom(boolean... values) {
    return new IValue(Kind.BOOL_LIST, values);
  }

  public static IValue listFrom(long... values) {
    return new IValue(Kind.LONG_LIST, values);
  }

  public static IValue listFrom(double... values) {
    return new IValue(Kind.DOUBLE_LIST, values);
  }

  public static IValue listFrom(Tensor... values) {
    return new IValue(Kind.TENSOR_LIST, values);
  }

  /** Values of one kind. */
  public static IValue listFrom(IValue... values) {
    for (IValue value : values)
      if (value.kind != values[0].kind)
        throw new IllegalArgumentException("A list has values of one kind; this one has " + values[0].text() + " and " + value.text() + ".");
    return new IValue(Kind.LIST, values);
  }

  public static IValue tupleFrom(IValue... values) {
    return new IValue(Kind.TUPLE, values);
  }

  public static IValue dictStringKeyFrom(Map<String, IValue> values) {
    return new IValue(Kind.DICT_STRING_KEY, values);
  }

  public static IValue dictLongKeyFrom(Map<Long, IValue> values) {
    return new IValue(Kind.DICT_LONG_KEY, values);
  }

  public boolean isNull() {
    return kind == Kind.NULL;
  }

  public boolean isLong() {
    return kind == Kind.LONG;
  }

  public boolean isTuple() {
    return kind == Kind.TUPLE;
  }

  public boolean isBoolList() {
    return kind == Kind.BOOL_LIST;
  }

  public boolean isLongList() {
    return kind == Kind.LONG_LIST;
  }

  public boolean isDoubleList() {
    return kind == Kind.DOUBLE_LIST;
  }

  public boolean isTensorList() {
    return kind == Kind.TENSOR_LIST;
  }

  public boolean isList() {
    return kind == Kind.LIST;
  }

  public boolean isDictStringKey() {
    return kind == Kind.DICT_STRING_KEY;
  }

  public boolean isDictLongKey() {
    return kind == Kind.DICT_LONG_KEY;
  }

  public long toLong() {
    return (Long) as(Kind.LONG);
  }

  public boolean[] toBoolList() {
    return (boolean[]) as(Kind.BOOL_LIST);
  }

  public long[] toLongList() {
    return (long[]) as(Kind.LONG_LIST);
  }

  public double[] toDoubleList() {
    return (double[]) as(Kind.DOUBLE_LIST);
  }

  public Tensor[] toTensorList() {
    return (Tensor[]) as(Kind.TENSOR_LIST);
  }

  public IValue[] toList() {
    return (IValue[]) as(Kind.LIST);
  }

  public IValue[] toTuple() {
    return (IValue[]) as(Kind.TUPLE);
  }

  @SuppressWarnings("unchecked")
  public Map<String, IValue> toDictStringKey() {
    return (Map<String, IValue>) as(Kind.DICT_STRING_KEY);
  }

  @SuppressWarnings("unchecked")
  public Map<Long, IValue> toDictLongKey() {
    return (Map<Long, IValue>) as(Kind.DICT_LONG_KEY);
  }

  private Object as(Kind wanted) {
    if (kind != wanted) throw isNot(text(wanted));
    return value;
  }

  @Override
  String text() {
    return text(kind);
  }

  private static String text(Kind kind) {
    return kind == Kind.NULL ? "none" : "a " + kind.name().toLowerCase(Locale.ROOT).replace('_', ' ');
  }

  /**
   * The tensors in the order in which programs have them: those of lists and tuples one after another, those of dicts by their sorted
   * keys. A number becomes a tensor without axes, of the type that the input has.
   */
  static Tensor[] flat(IValue[] values, TensorInfo[] wanted) {
    List<Object> items = new ArrayList<>();
    for (IValue value : values) value.flatten(items);
    Tensor[] tensors = new Tensor[items.size()];
    for (int i = 0; i < tensors.length; ++i) {
      Object item = items.get(i);
      tensors[i] = item instanceof Tensor ? (Tensor) item : number(item, i < wanted.length ? wanted[i] : null);
    }
    return tensors;
  }

  private static Tensor number(Object item, TensorInfo wanted) {
    DType dtype =
        wanted != null ? wanted.dtype : item instanceof Double ? DType.FLOAT32 : item instanceof Boolean ? DType.BOOL : DType.INT64;
    boolean fits =
        item instanceof Boolean ? dtype == DType.BOOL : item instanceof Long ? dtype == DType.INT64 : dtype == DType.FLOAT32 || dtype == DType.FLOAT64;
    if (!fits)
      throw new IllegalArgumentException(
          "The input " + wanted + " was given a " + item.getClass().getSimpleName().toLowerCase(Locale.ROOT) + ". Give a tensor of that type.");
    Tensor tensor = Tensor.zeros(new long[0], dtype);
    if (item instanceof Boolean) ((java.nio.ByteBuffer) tensor.buffer()).put(0, (byte) ((Boolean) item ? 1 : 0));
    else if (item instanceof Long) ((java.nio.LongBuffer) tensor.buffer()).put(0, (Long) item);
    else if (dtype == DType.FLOAT32) ((java.nio.FloatBuffer) tensor.buffer()).put(0, ((Double) item).floatValue());
    else ((java.nio.DoubleBuffer) tensor.buffer()).put(0, (Double) item);
    return tensor;
  }

  private void flatten(List<Object> items) {
    switch (kind) {
      case NULL:
        break;
      case TENSOR:
      case BOOL:
      case LONG:
      case DOUBLE:
        items.add(value);
        break;
      case TENSOR_LIST:
        Collections.addAll(items, (Object[]) value);
        break;
      case LIST:
      case TUPLE:
        for (IValue item : (IValue[]) value) item.flatten(items);
        break;
      case DICT_STRING_KEY:
        for (IValue item : new TreeMap<>(toDictStringKey()).values()) item.flatten(items);
        break;
      case DICT_LONG_KEY:
        for (IValue item : new TreeMap<>(toDictLongKey()).values()) item.flatten(items);
        break;
      default:
        throw new IllegalArgumentException(
            "The value is " + text() + ", which cannot be given to a program, whose texts and lists of numbers are fixed when it is compiled.");
    }
  }

  @Override
  public String toString() {
    return value instanceof Object[] ? text().substring(2) + Arrays.toString((Object[]) value) : value == null ? "null" : value.toString();
  }
}
