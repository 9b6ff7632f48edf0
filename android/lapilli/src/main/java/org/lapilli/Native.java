package org.lapilli;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;

/** The functions of native/jni/jni.cpp, where their arrays are described. All throw LapilliException. */
final class Native {
  static {
    String path = System.getProperty("org.lapilli.library"); // a file, for a JVM that is not Android's
    if (path != null) System.load(path);
    else System.loadLibrary("lapilli");
  }

  private Native() {}

  static native long load(byte[] path, ByteBuffer memory, byte[] device, byte[] plan, byte[] cacheDir, boolean firstRun);

  static native String warning(long program);

  static native void destroy(long program);

  static native int methods(long program);

  static native String methodName(long program, int method);

  static native long[] counts(long program, int method);

  static native String specName(long program, int method, boolean output, int index);

  static native long[] spec(long program, int method, boolean output, int index);

  static native long bind(long program, int method, Buffer[] inputs, long[] tensors);

  static native long[] outputs(long binding);

  static native void attach(long binding, Buffer[] outputs);

  static native void run(long program, long binding);

  static native void unbind(long binding);

  static native void reset(long program);

  static native long[] memory(long program);

  static native int deviceCount();

  static native String[] device(int index);

  static native long[] deviceNumbers(int index);

  static native String[] programDevice(long program);

  static native String version();

  static native String metadata(long program, byte[] name);

  static native long writer(long program);

  static native void destroyWriter(long writer);

  static native long[] aboutWriter(long writer);

  static native void begin(long writer, int[] tokens, float[] limits, int topK, int seed);

  static native int next(long writer);

  static native long[] alive();

  /** A text for C, or null. */
  static byte[] utf8(String text) {
    if (text == null) return null;
    if (text.indexOf('\0') >= 0) throw new IllegalArgumentException("A text with a zero character was given: " + text.replace('\0', '?'));
    return text.getBytes(StandardCharsets.UTF_8);
  }
}
