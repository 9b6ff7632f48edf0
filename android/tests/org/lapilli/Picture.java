package org.lapilli;

import android.graphics.Bitmap;
import java.util.function.IntBinaryOperator;

/** A picture that computes its pixels, 0xAARRGGBB, from their places (x, y). */
final class Picture extends Bitmap {
  private final int width, height;
  private final IntBinaryOperator pixel;

  Picture(int width, int height, IntBinaryOperator pixel) {
    this.width = width;
    this.height = height;
    this.pixel = pixel;
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
  public void getPixels(int[] pixels, int offset, int stride, int x, int y, int width, int height) {
    for (int j = 0; j < height; ++j) for (int i = 0; i < width; ++i) pixels[offset + j * stride + i] = pixel.applyAsInt(x + i, y + j);
  }
}
