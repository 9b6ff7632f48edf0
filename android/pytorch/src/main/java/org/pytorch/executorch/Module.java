package org.pytorch.executorch;

/** ExecuTorch's modules: those of org.lapilli by another name, with its .lap and .pt files instead of .pte. */
public class Module implements java.io.Closeable {
  public static final int LOAD_MODE_FILE = 0;
  public static final int LOAD_MODE_MMAP = 1;
  public static final int LOAD_MODE_MMAP_USE_MLOCK = 2;
  public static final int LOAD_MODE_MMAP_USE_MLOCK_IGNORE_ERRORS = 3;

  private final org.lapilli.Module module;

  private Module(org.lapilli.Module module) {
    this.module = module;
  }

  public static Module load(String modelPath) {
    return new Module(org.lapilli.Module.load(modelPath));
  }

  /** The player reads every file in the same way, whatever the mode. */
  public static Module load(String modelPath, int loadMode) {
    return load(modelPath);
  }

  /** The device computes, whatever the number of threads. */
  public static Module load(String modelPath, int loadMode, int numThreads) {
    return load(modelPath);
  }

  public EValue[] forward(EValue... inputs) {
    return outer(module.forward(inner(inputs)));
  }

  public EValue[] execute(String methodName, EValue... inputs) {
    return outer(module.execute(methodName, inner(inputs)));
  }

  /** 0: all methods are loaded with the module. Throws IllegalArgumentException where there is no such method. */
  public int loadMethod(String methodName) {
    module.inputs(methodName);
    return 0;
  }

  public String[] getMethods() {
    return module.getMethods();
  }

  /** Empty: errors are exceptions. */
  public String[] readLogBuffer() {
    return new String[0];
  }

  public void destroy() {
    module.close();
  }

  @Override
  public void close() {
    module.close();
  }

  private static org.lapilli.EValue[] inner(EValue[] values) {
    org.lapilli.EValue[] all = new org.lapilli.EValue[values.length];
    for (int i = 0; i < all.length; ++i) all[i] = values[i] == null ? null : values[i].value;
    return all;
  }

  private static EValue[] outer(org.lapilli.EValue[] values) {
    EValue[] all = new EValue[values.length];
    for (int i = 0; i < all.length; ++i) all[i] = new EValue(values[i]);
    return all;
  }
}
