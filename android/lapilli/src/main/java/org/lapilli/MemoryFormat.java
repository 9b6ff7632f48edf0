package org.lapilli;

/** The order of a tensor's elements in memory. Programs take CONTIGUOUS ones; images may be prepared in another order. */
public enum MemoryFormat {
  CONTIGUOUS,
  CHANNELS_LAST,
  CHANNELS_LAST_3D
}
