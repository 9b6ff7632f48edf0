package org.pytorch;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.charset.StandardCharsets;
import java.util.Enumeration;
import java.util.Map;
import java.util.zip.ZipEntry;
import java.util.zip.ZipFile;

/** PyTorch Mobile's modules: those of org.lapilli by another name. Without a device it is the best Vulkan device. */
public class Module {
  private final org.lapilli.Module module;

  Module(org.lapilli.Module module) {
    this.module = module;
  }

  public static Module load(String path) {
    return load(path, Device.VULKAN);
  }

  public static Module load(String path, Device device) {
    return new Module(org.lapilli.Module.load(path, device.lapilli()));
  }

  /** Also reads the extra files of a .pt file that the map names. */
  public static Module load(String path, Map<String, String> extraFiles, Device device) {
    Module module = load(path, device);
    if (extraFiles != null && !extraFiles.isEmpty()) read(path, extraFiles);
    return module;
  }

  private static void read(String path, Map<String, String> extraFiles) {
    try (ZipFile file = new ZipFile(path)) {
      for (Enumeration<? extends ZipEntry> entries = file.entries(); entries.hasMoreElements(); ) {
        ZipEntry entry = entries.nextElement();
        int folder = entry.getName().indexOf("/extra/"); // after the name of the archive
        String name = folder < 0 ? null : entry.getName().substring(folder + "/extra/".length());
        if (name == null || !extraFiles.containsKey(name)) continue;
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        byte[] part = new byte[8192];
        try (InputStream from = file.getInputStream(entry)) {
          for (int n = from.read(part); n > 0; n = from.read(part)) bytes.write(part, 0, n);
        }
        extraFiles.put(name, new String(bytes.toByteArray(), StandardCharsets.UTF_8));
      }
    } catch (IOException failed) {
      throw new IllegalArgumentException("The extra files of " + path + " cannot be read: " + failed.getMessage(), failed);
    }
  }

  public IValue forward(IValue... inputs) {
    return new IValue(module.forward(IValue.inner(inputs)));
  }

  public IValue runMethod(String methodName, IValue... inputs) {
    return new IValue(module.runMethod(methodName, IValue.inner(inputs)));
  }

  public void destroy() {
    module.close();
  }
}
