package org.pytorch.torchvision;

import android.graphics.Bitmap;
import android.media.Image;
import java.nio.FloatBuffer;
import org.pytorch.MemoryFormat;
import org.pytorch.Tensor;

/** torchvision's pictures for PyTorch Mobile: org.lapilli.torchvision by another name. */
public final class TensorImageUtils {
  public static float[] TORCHVISION_NORM_MEAN_RGB = {0.485f, 0.456f, 0.406f};
  public static float[] TORCHVISION_NORM_STD_RGB = {0.229f, 0.224f, 0.225f};

  private TensorImageUtils() {}

  private static org.lapilli.MemoryFormat inner(MemoryFormat format) {
    return org.lapilli.MemoryFormat.valueOf(format.name());
  }

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
    org.lapilli.torchvision.TensorImageUtils.bitmapToFloatBuffer(
        bitmap, x, y, width, height, mean, std, out, offset, inner(format));
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
    org.lapilli.torchvision.TensorImageUtils.imageYUV420CenterCropToFloatBuffer(
        image, rotateCWDegrees, tensorWidth, tensorHeight, mean, std, out, offset, inner(format));
  }
}
