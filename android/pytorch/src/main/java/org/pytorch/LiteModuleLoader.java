package org.pytorch;

import java.util.Map;

/** Loads files of _save_for_lite_interpreter, which are loaded as any others. */
public final class LiteModuleLoader {
  private LiteModuleLoader() {}

  public static Module load(String path) {
    return Module.load(path);
  }

  public static Module load(String path, Map<String, String> extraFiles, Device device) {
    return Module.load(path, extraFiles, device);
  }

  public static Module loadModuleFromAsset(android.content.res.AssetManager assets, String name) {
    return PyTorchAndroid.loadModuleFromAsset(assets, name);
  }
}
