package org.lapilli.torchvision;

import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import org.lapilli.MemoryFormat;

/** Pictures as tensors of floats, on any Java machine. TensorImageUtils has the same for Android's Bitmap and Image. */
public final class Pixels {
  /** One plane of a picture in YUV 4:2:0, as Android's Image.Plane has it. */
  public static final class Plane {
    final ByteBuffer data;
    final int rowStride;
    final int pixelStride;

    public Plane(ByteBuffer data, int rowStride, int pixelStride) {
      this.data = data;
      this.rowStride = rowStride;
      this.pixelStride = pixelStride;
    }

    int at(int x, int y) {
      return data.get(y * rowStride + x * pixelStride) & 0xff;
    }
  }

  private Pixels() {}

  private static void check(float[] mean, float[] std, FloatBuffer out, int offset, int width, int height, MemoryFormat format) {
    if (mean == null || mean.length != 3) throw new IllegalArgumentException("The mean has three numbers: of red, green and blue.");
    if (std == null || std.length != 3) throw new IllegalArgumentException("The standard deviation has three numbers: of red, green and blue.");
    if (format != MemoryFormat.CONTIGUOUS && format != MemoryFormat.CHANNELS_LAST)
      throw new IllegalArgumentException("The memory format is " + format + "; pictures are written as CONTIGUOUS or CHANNELS_LAST.");
    if (width <= 0 || height <= 0) throw new IllegalArgumentException("The picture has the size " + width + " x " + height + ".");
    if (offset < 0 || (long) out.capacity() - offset < 3L * width * height)
      throw new IllegalArgumentException(
          "The buffer has " + out.capacity() + " elements; from " + offset + " on, " + 3L * width * height + " are needed.");
  }

  /**
   * Writes pixels 0xAARRGGBB, row by row, as (value / 255 - mean) / std: three planes (CONTIGUOUS), or three numbers for each pixel
   * (CHANNELS_LAST).
   */
  public static void argbToFloatBuffer(
      int[] pixels, int width, int height, float[] mean, float[] std, FloatBuffer out, int offset, MemoryFormat format) {
    check(mean, std, out, offset, width, height, format);
    if (pixels.length < width * height)
      throw new IllegalArgumentException("There are " + pixels.length + " pixels, and the picture has " + width + " x " + height + ".");
    for (int i = 0; i < width * height; ++i)
      put(pixels[i] >> 16 & 0xff, pixels[i] >> 8 & 0xff, pixels[i] & 0xff, mean, std, out, offset, i, width * height, format);
  }

  private static void put(
      int red, int green, int blue, float[] mean, float[] std, FloatBuffer out, int offset, int index, int area, MemoryFormat format) {
    boolean planes = format == MemoryFormat.CONTIGUOUS;
    int at = offset + (planes ? index : 3 * index), step = planes ? area : 1;
    out.put(at, (red / 255f - mean[0]) / std[0]);
    out.put(at + step, (green / 255f - mean[1]) / std[1]);
    out.put(at + 2 * step, (blue / 255f - mean[2]) / std[2]);
  }

  /**
   * Turns a picture of a camera (YUV 4:2:0 of BT.601 with 16..235, as YUV_420_888) by rotateCWDegrees (0, 90, 180 or 270) clockwise,
   * takes the largest part in its middle with the tensor's proportions, and writes its nearest pixels as argbToFloatBuffer does.
   */
  public static void yuv420CenterCropToFloatBuffer(
      Plane luma,
      Plane u,
      Plane v,
      int width,
      int height,
      int rotateCWDegrees,
      int tensorWidth,
      int tensorHeight,
      float[] mean,
      float[] std,
      FloatBuffer out,
      int offset,
      MemoryFormat format) {
    check(mean, std, out, offset, tensorWidth, tensorHeight, format);
    if (rotateCWDegrees != 0 && rotateCWDegrees != 90 && rotateCWDegrees != 180 && rotateCWDegrees != 270)
      throw new IllegalArgumentException("rotateCWDegrees is " + rotateCWDegrees + "; it is 0, 90, 180 or 270.");
    if (width <= 0 || height <= 0) throw new IllegalArgumentException("The picture has the size " + width + " x " + height + ".");
    boolean sideways = rotateCWDegrees == 90 || rotateCWDegrees == 270;
    int turnedWidth = sideways ? height : width, turnedHeight = sideways ? width : height;
    // The part: of the turned picture, with tensorWidth : tensorHeight.
    double scale = Math.min((double) turnedWidth / tensorWidth, (double) turnedHeight / tensorHeight);
    double left = (turnedWidth - tensorWidth * scale) / 2, top = (turnedHeight - tensorHeight * scale) / 2;
    for (int row = 0; row < tensorHeight; ++row) {
      int y = Math.min(turnedHeight - 1, (int) (top + (row + 0.5) * scale));
      for (int column = 0; column < tensorWidth; ++column) {
        int x = Math.min(turnedWidth - 1, (int) (left + (column + 0.5) * scale));
        int sourceX, sourceY;
        switch (rotateCWDegrees) {
          case 90:
            sourceX = y;
            sourceY = height - 1 - x;
            break;
          case 180:
            sourceX = width - 1 - x;
            sourceY = height - 1 - y;
            break;
          case 270:
            sourceX = width - 1 - y;
            sourceY = x;
            break;
          default:
            sourceX = x;
            sourceY = y;
        }
        int c = Math.max(0, luma.at(sourceX, sourceY) - 16) * 298;
        int d = u.at(sourceX / 2, sourceY / 2) - 128, e = v.at(sourceX / 2, sourceY / 2) - 128;
        put(
            level(c + 409 * e),
            level(c - 100 * d - 208 * e),
            level(c + 516 * d),
            mean,
            std,
            out,
            offset,
            row * tensorWidth + column,
            tensorWidth * tensorHeight,
            format);
      }
    }
  }

  private static int level(int fixed) { // in 1/256
    return Math.max(0, Math.min(255, (fixed + 128) >> 8));
  }
}
