package org.lapilli.testapp;

import android.app.Activity;
import android.graphics.Bitmap;
import android.graphics.BitmapFactory;
import android.os.Bundle;
import android.widget.TextView;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.List;
import org.lapilli.Binding;
import org.lapilli.Device;
import org.lapilli.Module;
import org.lapilli.Tensor;
import org.lapilli.torchvision.TensorImageUtils;

/** The picture of the assets, classified again and again: its label and the milliseconds that a run takes. */
public final class MainActivity extends Activity {
  private static final int SIZE = 224, WARMUP = 5, RUNS = 50;

  private TextView text;

  @Override
  protected void onCreate(Bundle state) {
    super.onCreate(state);
    text = new TextView(this);
    text.setPadding(40, 40, 40, 40);
    setContentView(text);
    Module.setCacheDir(getCodeCacheDir().getPath());
    new Thread(this::classify).start();
  }

  private void classify() {
    try {
      long start = System.nanoTime();
      try (Module module = Module.load(asset("mobilenet2-vulkan.pt"), Device.VULKAN)) {
        double loaded = (System.nanoTime() - start) / 1e6;
        FloatBuffer buffer = Tensor.allocateFloatBuffer(3 * SIZE * SIZE);
        Tensor input = Tensor.fromBlob(buffer, new long[] {1, 3, SIZE, SIZE});
        try (InputStream file = getAssets().open("image.jpg")) {
          Bitmap picture = Bitmap.createScaledBitmap(BitmapFactory.decodeStream(file), SIZE, SIZE, true);
          TensorImageUtils.bitmapToFloatBuffer(
              picture,
              0,
              0,
              SIZE,
              SIZE,
              TensorImageUtils.TORCHVISION_NORM_MEAN_RGB,
              TensorImageUtils.TORCHVISION_NORM_STD_RGB,
              buffer,
              0);
        }
        try (Binding binding = module.bind(input)) {
          for (int i = 0; i < WARMUP; ++i) binding.run();
          start = System.nanoTime();
          for (int i = 0; i < RUNS; ++i) binding.run();
          double each = (System.nanoTime() - start) / 1e6 / RUNS;
          float[] scores = binding.outputs()[0].getDataAsFloatArray();
          int best = 0;
          for (int i = 1; i < scores.length; ++i) if (scores[i] > scores[best]) best = i;
          show(String.format("%s%n%s%nloaded in %.0f ms%n%.2f ms a run", module.device(), labels().get(best), loaded, each));
        }
      }
    } catch (IOException | RuntimeException failed) {
      show(failed.toString()); // the player's sentence
    }
  }

  private void show(String message) {
    runOnUiThread(() -> text.setText(message));
  }

  private ByteBuffer asset(String name) throws IOException {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    try (InputStream file = getAssets().open(name)) {
      byte[] part = new byte[1 << 16];
      for (int n = file.read(part); n > 0; n = file.read(part)) bytes.write(part, 0, n);
    }
    ByteBuffer all = ByteBuffer.allocateDirect(bytes.size());
    all.put(bytes.toByteArray()).rewind();
    return all;
  }

  private List<String> labels() throws IOException {
    List<String> labels = new ArrayList<>();
    try (BufferedReader file = new BufferedReader(new InputStreamReader(getAssets().open("labels.txt")))) {
      for (String line = file.readLine(); line != null; line = file.readLine()) labels.add(line);
    }
    return labels;
  }
}
