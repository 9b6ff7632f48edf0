package org.lapilli;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;

import android.content.res.AssetManager;
import java.io.ByteArrayInputStream;
import java.io.InputStream;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import org.junit.Test;
import org.pytorch.Device;
import org.pytorch.IValue;
import org.pytorch.LiteModuleLoader;
import org.pytorch.Module;
import org.pytorch.PyTorchAndroid;
import org.pytorch.Tensor;
import org.pytorch.executorch.EValue;

/** An application of PyTorch Mobile, and one of ExecuTorch, with nothing changed but what they depend on. */
public class PytorchTest {
  @Test
  public void tutorial() throws Exception {
    Module mModule = Module.load(Models.path("net"), Device.VULKAN);
    FloatBuffer buffer = Tensor.allocateFloatBuffer(1 * 3 * 32 * 32);
    Tensor inputTensor = Tensor.fromBlob(buffer, new int[] {1, 3, 32, 32});
    buffer.put(Models.floatsOf("net.in0"));
    Tensor outputTensor = mModule.forward(IValue.from(inputTensor)).toTensor();
    assertArrayEquals(Models.floatsOf("net.out0"), outputTensor.getDataAsFloatArray(), 0);
    assertEquals(org.pytorch.DType.FLOAT32, outputTensor.dtype());
    long buffers = org.lapilli.Tensor.allocatedBuffers();
    long[] alive = Native.alive();
    for (int i = 0; i < 10; ++i) mModule.forward(IValue.from(inputTensor)); // the recipe's reuse: only results are new
    assertEquals(buffers + 10, org.lapilli.Tensor.allocatedBuffers());
    assertArrayEquals(alive, Native.alive());
    mModule.destroy();
    assertThrows(IllegalStateException.class, () -> mModule.forward(IValue.from(inputTensor)));
  }

  /** mobilenet2-vulkan.pt and mobilenetv2_metal.pt of the tutorials, as Python writes them. */
  @Test
  public void filesOfTheTutorials() throws Exception {
    Tensor input = Tensor.fromBlob(Models.floatsOf("net.in0"), new long[] {1, 3, 32, 32});
    float[] want = Models.floatsOf("net.out0");
    java.util.Map<String, String> extra = new java.util.HashMap<>();
    extra.put("labels.txt", "");
    extra.put("other.txt", "stays");
    Module module = Module.load(Models.FOLDER.resolve("net-vulkan.pt").toString(), extra, Device.VULKAN);
    assertEquals("one\ntwo", extra.get("labels.txt"));
    assertEquals("stays", extra.get("other.txt"));
    assertArrayEquals(want, module.forward(IValue.from(input)).toTensor().getDataAsFloatArray(), 1e-6f); // batch norm is folded in
    module.destroy();
    Module metal = LiteModuleLoader.load(Models.FOLDER.resolve("net_metal.pt").toString());
    assertArrayEquals(want, metal.forward(IValue.from(input)).toTensor().getDataAsFloatArray(), 3e-3f); // computed in float16
    metal.destroy();
    Module told = Module.load(Models.FOLDER.resolve("told.pt").toString());
    assertArrayEquals(want, told.forward(IValue.from(input)).toTensor().getDataAsFloatArray(), 1e-6f);
    told.forward(IValue.from(Tensor.fromBlob(new float[3 * 20 * 50], new long[] {1, 3, 20, 50}))); // any picture
    told.destroy();
    LapilliException failed =
        assertThrows(LapilliException.class, () -> Module.load(Models.FOLDER.resolve("plain.pt").toString()));
    assertEquals(LapilliException.Status.INVALID_FILE, failed.status());
    assertEquals(failed.getMessage(), true, failed.getMessage().contains("without a Lapilli program"));
  }

  @Test
  public void assetsAndLists() throws Exception {
    AssetManager assets =
        new AssetManager() {
          @Override
          public InputStream open(String name) throws java.io.IOException {
            return new ByteArrayInputStream(Files.readAllBytes(Models.FOLDER.resolve(name)));
          }
        };
    PyTorchAndroid.setNumThreads(1);
    Module module = PyTorchAndroid.loadModuleFromAsset(assets, "pair.lap");
    Tensor x = Tensor.fromBlob(Models.floatsOf("pair.in0"), new long[] {3, 1});
    Tensor n = Tensor.fromBlob(new long[] {1, -7, 46340}, new long[] {3});
    assertThrows(RuntimeException.class, () -> module.forward(IValue.listFrom(x, n)));
    assertThrows(IllegalArgumentException.class, () -> PyTorchAndroid.loadModuleFromAsset(assets, "none.lap"));
    module.destroy();
    Module lite = LiteModuleLoader.load(Models.path("net"));
    assertEquals(1, lite.forward(IValue.from(Tensor.fromBlob(Models.floatsOf("net.in0"), new long[] {1, 3, 32, 32}))).toTensor().shape()[0]);
    lite.destroy();
  }

  @Test
  public void executorch() throws Exception {
    try (org.pytorch.executorch.Module module =
        org.pytorch.executorch.Module.load(Models.path("net"), org.pytorch.executorch.Module.LOAD_MODE_MMAP)) {
      org.pytorch.executorch.Tensor input =
          org.pytorch.executorch.Tensor.fromBlob(Models.floatsOf("net.in0"), new long[] {1, 3, 32, 32});
      EValue[] outputs = module.forward(EValue.from(input));
      assertArrayEquals(Models.floatsOf("net.out0"), outputs[0].toTensor().getDataAsFloatArray(), 0);
      assertEquals(org.pytorch.executorch.DType.FLOAT, outputs[0].toTensor().dtype());
      assertEquals(0, module.loadMethod("forward"));
      assertArrayEquals(new String[] {"forward"}, module.getMethods());
      assertArrayEquals(outputs[0].toTensor().getDataAsFloatArray(), module.execute("forward", EValue.from(input))[0].toTensor().getDataAsFloatArray(), 0);
    }
  }
}
