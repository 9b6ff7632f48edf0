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

  /** A picture in memory. */
  private static final class Photo extends Bitmap {
    private final IntBuffer pixels;

    Photo(IntBuffer pixels) {
      this.pixels = pixels;
    }

    @Override
    public int getWidth() {
      return SIDE;
    }

    @Override
    public int getHeight() {
      return SIDE;
    }

    @Override
    public void getPixels(int[] out, int offset, int stride, int x, int y, int width, int height) {
      for (int j = 0; j < height; ++j) for (int i = 0; i < width; ++i) out[offset + j * stride + i] = pixels.get((y + j) * SIDE + x + i);
    }
  }

  @Test
  public void aPhotoIsNamed() throws Exception {
    List<String> names = Files.readAllLines(Models.FOLDER.resolve("labels.txt"));
    Bitmap photo = new Photo(Models.bytes("cat.argb").asIntBuffer());
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
