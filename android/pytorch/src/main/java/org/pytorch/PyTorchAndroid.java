package org.pytorch;

import android.content.res.AssetManager;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;

public final class PyTorchAndroid {
  private PyTorchAndroid() {}

  public static Module loadModuleFromAsset(AssetManager assets, String name) {
    return loadModuleFromAsset(assets, name, Device.VULKAN);
  }

  public static Module loadModuleFromAsset(AssetManager assets, String name, Device device) {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    try (InputStream from = assets.open(name)) {
      byte[] part = new byte[1 << 16];
      for (int n = from.read(part); n > 0; n = from.read(part)) bytes.write(part, 0, n);
    } catch (IOException failed) {
      throw new IllegalArgumentException("The asset " + name + " cannot be read: " + failed.getMessage(), failed);
    }
    ByteBuffer file = ByteBuffer.allocateDirect(bytes.size());
    file.put(bytes.toByteArray()).rewind();
    return new Module(org.lapilli.Module.load(file, device.lapilli()));
  }

  /** Does nothing: the device computes. */
  public static void setNumThreads(int threads) {}
}
