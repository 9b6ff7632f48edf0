package org.lapilli;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;

import android.graphics.Bitmap;
import java.nio.IntBuffer;
import java.nio.file.Files;
import java.util.List;
import org.junit.Test;
import org.lapilli.torchvision.TensorImageUtils;

/** EfficientNet-Lite0 from a picture to its name, as an application does it; the numbers are those of Python's player. */
public class ClassifierTest {
  private static final int SIDE = 224;
  private static final float[] MEAN = {127 / 255f, 127 / 255f, 127 / 255f}, STD = {128 / 255f, 128 / 255f, 128 / 255f};

  @Test
  public void aPhotoIsNamed() throws Exception {
    List<String> names = Files.readAllLines(Models.FOLDER.resolve("labels.txt"));
    IntBuffer pixels = Models.bytes("cat.argb").asIntBuffer();
    Bitmap photo = new Picture(SIDE, SIDE, (x, y) -> pixels.get(y * SIDE + x));
    try (Module module = Module.load(Models.path("efficientnet"), Device.VULKAN)) {
      Tensor input = TensorImageUtils.bitmapToFloat32Tensor(photo, MEAN, STD);
      assertArrayEquals(Models.floatsOf("efficientnet.in0"), input.getDataAsFloatArray(), 1e-5f);
      float[] scores = module.forward(IValue.from(input)).toTensor().getDataAsFloatArray();
      assertArrayEquals(Models.floatsOf("efficientnet.out0"), scores, 1e-3f); // inputs are some 1e-6 apart
      int best = 0;
      for (int i = 1; i < scores.length; ++i) if (scores[i] > scores[best]) best = i;
      assertEquals("Egyptian cat", names.get(best));
    }
  }
}
