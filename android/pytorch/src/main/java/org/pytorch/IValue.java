package org.pytorch;

import java.util.HashMap;
import java.util.Map;
import org.lapilli.renamed.RenamedValue;

/** PyTorch Mobile's values: those of org.lapilli by another name. */
public final class IValue extends RenamedValue {
  final org.lapilli.IValue value;

  IValue(org.lapilli.IValue value) {
    super(value);
    this.value = value;
  }

  static org.lapilli.IValue[] inner(IValue[] values) {
    org.lapilli.IValue[] all = new org.lapilli.IValue[values.length];
    for (int i = 0; i < all.length; ++i) all[i] = values[i] == null ? null : values[i].value;
    return all;
  }

  private static IValue[] outer(org.lapilli.IValue[] values) {
    IValue[] all = new IValue[values.length];
    for (int i = 0; i < all.length; ++i) all[i] = new IValue(values[i]);
    return all;
  }

  private static <K> Map<K, org.lapilli.IValue> inner(Map<K, IValue> values) {
    Map<K, org.lapilli.IValue> all = new HashMap<>();
    for (Map.Entry<K, IValue> item : values.entrySet()) all.put(item.getKey(), item.getValue().value);
    return all;
  }

  private static <K> Map<K, IValue> outer(Map<K, org.lapilli.IValue> values) {
    Map<K, IValue> all = new HashMap<>();
    for (Map.Entry<K, org.lapilli.IValue> item : values.entrySet()) all.put(item.getKey(), new IValue(item.getValue()));
    return all;
  }

  public static IValue optionalNull() {
    return new IValue(org.lapilli.IValue.optionalNull());
  }

  public static IValue from(Tensor tensor) {
    return new IValue(org.lapilli.IValue.from(tensor == null ? null : tensor.tensor));
  }

  public static IValue from(boolean value) {
    return new IValue(org.lapilli.IValue.from(value));
  }

  public static IValue from(long value) {
    return new IValue(org.lapilli.IValue.from(value));
  }

  public static IValue from(double value) {
    return new IValue(org.lapilli.IValue.from(value));
  }

  public static IValue from(String value) {
    return new IValue(org.lapilli.IValue.from(value));
  }

  public static IValue listFrom(boolean... values) {
    return new IValue(org.lapilli.IValue.listFrom(values));
  }

  public static IValue listFrom(long... values) {
    return new IValue(org.lapilli.IValue.listFrom(values));
  }

  public static IValue listFrom(double... values) {
    return new IValue(org.lapilli.IValue.listFrom(values));
  }

  public static IValue listFrom(Tensor... values) {
    org.lapilli.Tensor[] all = new org.lapilli.Tensor[values.length];
    for (int i = 0; i < all.length; ++i) all[i] = values[i].tensor;
    return new IValue(org.lapilli.IValue.listFrom(all));
  }

  public static IValue listFrom(IValue... values) {
    return new IValue(org.lapilli.IValue.listFrom(inner(values)));
  }

  public static IValue tupleFrom(IValue... values) {
    return new IValue(org.lapilli.IValue.tupleFrom(inner(values)));
  }

  public static IValue dictStringKeyFrom(Map<String, IValue> values) {
    return new IValue(org.lapilli.IValue.dictStringKeyFrom(inner(values)));
  }

  public static IValue dictLongKeyFrom(Map<Long, IValue> values) {
    return new IValue(org.lapilli.IValue.dictLongKeyFrom(inner(values)));
  }

  public boolean isNull() {
    return value.isNull();
  }

  public boolean isLong() {
    return value.isLong();
  }

  public boolean isTuple() {
    return value.isTuple();
  }

  public boolean isBoolList() {
    return value.isBoolList();
  }

  public boolean isLongList() {
    return value.isLongList();
  }

  public boolean isDoubleList() {
    return value.isDoubleList();
  }

  public boolean isTensorList() {
    return value.isTensorList();
  }

  public boolean isList() {
    return value.isList();
  }

  public boolean isDictStringKey() {
    return value.isDictStringKey();
  }

  public boolean isDictLongKey() {
    return value.isDictLongKey();
  }

  public Tensor toTensor() {
    return new Tensor(value.toTensor());
  }

  public long toLong() {
    return value.toLong();
  }

  public boolean[] toBoolList() {
    return value.toBoolList();
  }

  public long[] toLongList() {
    return value.toLongList();
  }

  public double[] toDoubleList() {
    return value.toDoubleList();
  }

  public Tensor[] toTensorList() {
    org.lapilli.Tensor[] tensors = value.toTensorList();
    Tensor[] all = new Tensor[tensors.length];
    for (int i = 0; i < all.length; ++i) all[i] = new Tensor(tensors[i]);
    return all;
  }

  public IValue[] toList() {
    return outer(value.toList());
  }

  public IValue[] toTuple() {
    return outer(value.toTuple());
  }

  public Map<String, IValue> toDictStringKey() {
    return outer(value.toDictStringKey());
  }

  public Map<Long, IValue> toDictLongKey() {
    return outer(value.toDictLongKey());
  }
}
