package org.lapilli;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;

import android.graphics.Bitmap;
import android.graphics.ImageFormat;
import android.media.Image;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.util.Random;
import org.junit.Test;
import org.lapilli.torchvision.TensorImageUtils;

/** Pictures as tensors, against the definitions in floating point; Android's classes are stubs with bodies. */
public class PicturesTest {
  private static final float[] MEAN = TensorImageUtils.TORCHVISION_NORM_MEAN_RGB, STD = TensorImageUtils.TORCHVISION_NORM_STD_RGB;

  private static int pixel(int x, int y) {
    return 0xff000000 | (x * 7 & 255) << 16 | (y * 11 & 255) << 8 | (x * y & 255);
  }

  private static Bitmap picture(int width, int height) {
    return new Picture(width, height, PicturesTest::pixel);
  }

  @Test
  public void bitmaps() {
    Tensor planes = TensorImageUtils.bitmapToFloat32Tensor(picture(5, 3), MEAN, STD);
    Tensor last = TensorImageUtils.bitmapToFloat32Tensor(picture(50, 30), 2, 1, 5, 3, MEAN, STD, MemoryFormat.CHANNELS_LAST);
    assertArrayEquals(new long[] {1, 3, 3, 5}, planes.shape());
    assertEquals(MemoryFormat.CHANNELS_LAST, last.memoryFormat());
    for (int y = 0; y < 3; ++y)
      for (int x = 0; x < 5; ++x)
        for (int c = 0; c < 3; ++c) {
          assertEquals(
              (((pixel(x, y) >> (16 - 8 * c)) & 255) / 255.0 - MEAN[c]) / STD[c], planes.getDataAsFloatArray()[c * 15 + y * 5 + x], 1e-5);
          assertEquals(
              (((pixel(x + 2, y + 1) >> (16 - 8 * c)) & 255) / 255.0 - MEAN[c]) / STD[c],
              last.getDataAsFloatArray()[(y * 5 + x) * 3 + c],
              1e-5);
        }
    FloatBuffer small = Tensor.allocateFloatBuffer(44);
    assertThrows(
        IllegalArgumentException.class, () -> TensorImageUtils.bitmapToFloatBuffer(picture(5, 3), 0, 0, 5, 3, MEAN, STD, small, 0));
    assertThrows(
        IllegalArgumentException.class, () -> TensorImageUtils.bitmapToFloat32Tensor(picture(5, 3), new float[1], STD));
  }

  /** A camera's picture with strides; format and planes as Android has them. */
  private static final class Frame extends Image {
    final int width, height, format;
    final byte[][] data = new byte[3][];
    final int[] rows, steps;

    Frame(int width, int height, int format, boolean interleaved, long seed) {
      this.width = width;
      this.height = height;
      this.format = format;
      int half = (width + 1) / 2, halfHigh = (height + 1) / 2, step = interleaved ? 2 : 1;
      rows = new int[] {width + 3, half * step + 1, half * step + 1};
      steps = new int[] {1, step, step};
      for (int p = 0; p < 3; ++p) {
        data[p] = new byte[rows[p] * (p == 0 ? height : halfHigh)];
        new Random(seed + p).nextBytes(data[p]);
      }
    }

    double at(int plane, int x, int y) {
      int shift = plane == 0 ? 0 : 1;
      return data[plane][(y >> shift) * rows[plane] + (x >> shift) * steps[plane]] & 255;
    }

    /** BT.601 with 16..235, in floating point. */
    double[] rgb(int x, int y) {
      double l = 255 / 219.0 * Math.max(0, at(0, x, y) - 16), u = at(1, x, y) - 128, v = at(2, x, y) - 128;
      return new double[] {clip(l + 1.59603 * v), clip(l - 0.39176 * u - 0.81297 * v), clip(l + 2.01723 * u)};
    }

    private static double clip(double x) {
      return Math.max(0, Math.min(255, x));
    }

    @Override
    public int getFormat() {
      return format;
    }

    @Override
    public int getWidth() {
      return width;
    }

    @Override
    public int getHeight() {
      return height;
    }

    @Override
    public Plane[] getPlanes() {
      Plane[] planes = new Plane[3];
      for (int p = 0; p < 3; ++p) {
        final int k = p;
        planes[p] =
            new Plane() {
              @Override
              public int getRowStride() {
                return rows[k];
              }

              @Override
              public int getPixelStride() {
                return steps[k];
              }

              @Override
              public ByteBuffer getBuffer() {
                return ByteBuffer.wrap(data[k]);
              }
            };
      }
      return planes;
    }

    @Override
    public void close() {}
  }

  @Test
  public void cameraFrames() {
    int[][] sizes = {{64, 48, 24, 24}, {64, 48, 17, 31}, {48, 64, 48, 64}, {7, 5, 1, 1}, {9, 13, 26, 18}, {1, 1, 3, 3}};
    for (int[] size : sizes)
      for (int degrees = 0; degrees < 360; degrees += 90)
        for (MemoryFormat format : new MemoryFormat[] {MemoryFormat.CONTIGUOUS, MemoryFormat.CHANNELS_LAST}) {
          Frame frame = new Frame(size[0], size[1], ImageFormat.YUV_420_888, degrees % 180 == 0, degrees);
          int w = size[2], h = size[3];
          Tensor tensor = TensorImageUtils.imageYUV420CenterCropToFloat32Tensor(frame, degrees, w, h, MEAN, STD, format);
          float[] got = tensor.getDataAsFloatArray();
          boolean sideways = degrees % 180 != 0;
          int tw = sideways ? size[1] : size[0], th = sideways ? size[0] : size[1];
          double scale = Math.min((double) tw / w, (double) th / h);
          for (int y = 0; y < h; ++y)
            for (int x = 0; x < w; ++x) {
              int sx = Math.min(tw - 1, (int) ((tw - w * scale) / 2 + (x + 0.5) * scale));
              int sy = Math.min(th - 1, (int) ((th - h * scale) / 2 + (y + 0.5) * scale));
              for (int turn = 0; turn < degrees / 90; ++turn) { // back, by 90 degrees anticlockwise
                int turnedWidth = (degrees / 90 - turn) % 2 == 0 ? size[0] : size[1];
                int next = turnedWidth - 1 - sx;
                sx = sy;
                sy = next;
              }
              double[] rgb = frame.rgb(sx, sy);
              for (int c = 0; c < 3; ++c) // one level of 255, which integers round
                assertEquals(
                    (rgb[c] / 255 - MEAN[c]) / STD[c],
                    got[format == MemoryFormat.CONTIGUOUS ? c * w * h + y * w + x : 3 * (y * w + x) + c],
                    1.01 / 255 / STD[c]);
            }
        }
    Frame other = new Frame(4, 4, 17, false, 0);
    assertThrows(
        IllegalArgumentException.class, () -> TensorImageUtils.imageYUV420CenterCropToFloat32Tensor(other, 0, 2, 2, MEAN, STD));
    Frame frame = new Frame(4, 4, ImageFormat.YUV_420_888, false, 0);
    assertThrows(
        IllegalArgumentException.class, () -> TensorImageUtils.imageYUV420CenterCropToFloat32Tensor(frame, 45, 2, 2, MEAN, STD));
  }
}
