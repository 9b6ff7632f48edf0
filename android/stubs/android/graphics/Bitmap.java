package android.graphics;

public class Bitmap {
  public int getWidth() {
    throw new UnsupportedOperationException();
  }

  public int getHeight() {
    throw new UnsupportedOperationException();
  }

  public void getPixels(int[] pixels, int offset, int stride, int x, int y, int width, int height) {
    throw new UnsupportedOperationException();
  }
}
