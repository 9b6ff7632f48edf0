package org.lapilli;

import java.util.Arrays;

/** The name, type and shape of an input or output of a method. A dynamic size is -1 in `shape`, with bounds (-1: unknown or none). */
public final class TensorInfo {
  public final String name;
  public final DType dtype;
  public final long[] shape;
  public final long[] min;
  public final long[] max;

  TensorInfo(String name, long[] words) {
    this.name = name;
    dtype = DType.of(words[0]);
    int rank = (words.length - 1) / 3;
    shape = new long[rank];
    min = new long[rank];
    max = new long[rank];
    for (int axis = 0; axis < rank; ++axis) {
      shape[axis] = words[1 + 3 * axis];
      min[axis] = words[2 + 3 * axis];
      max[axis] = words[3 + 3 * axis];
    }
  }

  @Override
  public String toString() {
    return name + " " + dtype + " " + Arrays.toString(shape);
  }
}
