package org.lapilli.torchvision;

import android.graphics.Bitmap;
import android.graphics.ImageFormat;
import android.media.Image;
import java.nio.FloatBuffer;
import org.lapilli.MemoryFormat;
import org.lapilli.Tensor;

/** Tensors of Android's pictures: float32 (1, 3, height, width), each number (value / 255 - mean) / std. */
public final class TensorImageUtils {
  public static final float[] TORCHVISION_NORM_MEAN_RGB = {0.485f, 0.456f, 0.406f};
  public static final float[] TORCHVISION_NORM_STD_RGB = {0.229f, 0.224f, 0.225f};

  private TensorImageUtils() {}

  public static Tensor bitmapToFloat32Tensor(Bitmap bitmap, float[] mean, float[] std) {
    return bitmapToFloat32Tensor(bitmap, mean, std, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor bitmapToFloat32Tensor(Bitmap bitmap, float[] mean, float[] std, MemoryFormat format) {
    return bitmapToFloat32Tensor(bitmap, 0, 0, bitmap.getWidth(), bitmap.getHeight(), mean, std, format);
  }

  public static Tensor bitmapToFloat32Tensor(Bitmap bitmap, int x, int y, int width, int height, float[] mean, float[] std) {
    return bitmapToFloat32Tensor(bitmap, x, y, width, height, mean, std, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor bitmapToFloat32Tensor(
      Bitmap bitmap, int x, int y, int width, int height, float[] mean, float[] std, MemoryFormat format) {
    FloatBuffer buffer = Tensor.allocateFloatBuffer(3 * width * height);
    bitmapToFloatBuffer(bitmap, x, y, width, height, mean, std, buffer, 0, format);
    return Tensor.fromBlob(buffer, new long[] {1, 3, height, width}, format);
  }

  public static void bitmapToFloatBuffer(
      Bitmap bitmap, int x, int y, int width, int height, float[] mean, float[] std, FloatBuffer out, int offset) {
    bitmapToFloatBuffer(bitmap, x, y, width, height, mean, std, out, offset, MemoryFormat.CONTIGUOUS);
  }

  public static void bitmapToFloatBuffer(
      Bitmap bitmap, int x, int y, int width, int height, float[] mean, float[] std, FloatBuffer out, int offset, MemoryFormat format) {
    int[] pixels = new int[width * height];
    bitmap.getPixels(pixels, 0, width, x, y, width, height);
    Pixels.argbToFloatBuffer(pixels, width, height, mean, std, out, offset, format);
  }

  public static Tensor imageYUV420CenterCropToFloat32Tensor(
      Image image, int rotateCWDegrees, int tensorWidth, int tensorHeight, float[] mean, float[] std) {
    return imageYUV420CenterCropToFloat32Tensor(image, rotateCWDegrees, tensorWidth, tensorHeight, mean, std, MemoryFormat.CONTIGUOUS);
  }

  public static Tensor imageYUV420CenterCropToFloat32Tensor(
      Image image, int rotateCWDegrees, int tensorWidth, int tensorHeight, float[] mean, float[] std, MemoryFormat format) {
    FloatBuffer buffer = Tensor.allocateFloatBuffer(3 * tensorWidth * tensorHeight);
    imageYUV420CenterCropToFloatBuffer(image, rotateCWDegrees, tensorWidth, tensorHeight, mean, std, buffer, 0, format);
    return Tensor.fromBlob(buffer, new long[] {1, 3, tensorHeight, tensorWidth}, format);
  }

  public static void imageYUV420CenterCropToFloatBuffer(
      Image image, int rotateCWDegrees, int tensorWidth, int tensorHeight, float[] mean, float[] std, FloatBuffer out, int offset) {
    imageYUV420CenterCropToFloatBuffer(
        image, rotateCWDegrees, tensorWidth, tensorHeight, mean, std, out, offset, MemoryFormat.CONTIGUOUS);
  }

  public static void imageYUV420CenterCropToFloatBuffer(
      Image image,
      int rotateCWDegrees,
      int tensorWidth,
      int tensorHeight,
      float[] mean,
      float[] std,
      FloatBuffer out,
      int offset,
      MemoryFormat format) {
    if (image.getFormat() != ImageFormat.YUV_420_888)
      throw new IllegalArgumentException("The image has the format " + image.getFormat() + "; ImageFormat.YUV_420_888 is accepted.");
    Image.Plane[] planes = image.getPlanes();
    Pixels.yuv420CenterCropToFloatBuffer(
        plane(planes[0]),
        plane(planes[1]),
        plane(planes[2]),
        image.getWidth(),
        image.getHeight(),
        rotateCWDegrees,
        tensorWidth,
        tensorHeight,
        mean,
        std,
        out,
        offset,
        format);
  }

  private static Pixels.Plane plane(Image.Plane plane) {
    return new Pixels.Plane(plane.getBuffer(), plane.getRowStride(), plane.getPixelStride());
  }
}
