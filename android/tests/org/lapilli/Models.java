package org.lapilli;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;

/** The programs of make_models.py. */
final class Models {
  static final Path FOLDER = Paths.get(System.getProperty("models"));

  private Models() {}

  static String path(String name) {
    return FOLDER.resolve(name + ".lap").toString();
  }

  static ByteBuffer bytes(String file) throws IOException {
    byte[] data = Files.readAllBytes(FOLDER.resolve(file));
    ByteBuffer buffer = ByteBuffer.allocateDirect(data.length).order(ByteOrder.nativeOrder());
    buffer.put(data).rewind();
    return buffer;
  }

  static Tensor floats(String file, long... shape) throws IOException {
    return Tensor.fromBlob(bytes(file).asFloatBuffer(), shape);
  }

  static float[] floatsOf(String file) throws IOException {
    float[] values = new float[(int) Files.size(FOLDER.resolve(file)) / 4];
    bytes(file).asFloatBuffer().get(values);
    return values;
  }
}
