package org.lapilli;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertNotEquals;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.junit.Test;

/** Runs, errors, threads, reuse and the end of modules, on a software device. Expected numbers are those of Python's player. */
public class ModuleTest {
  private static Tensor picture() throws Exception {
    return Models.floats("net.in0", 1, 3, 32, 32);
  }

  @Test
  public void tutorial() throws Exception {
    Module module = Module.load(Models.path("net"), Device.VULKAN);
    FloatBuffer buffer = Tensor.allocateFloatBuffer(1 * 3 * 32 * 32);
    buffer.put(Models.floatsOf("net.in0"));
    Tensor input = Tensor.fromBlob(buffer, new int[] {1, 3, 32, 32});
    Tensor output = module.forward(IValue.from(input)).toTensor();
    assertArrayEquals(new long[] {1, 10}, output.shape());
    assertArrayEquals(Models.floatsOf("net.out0"), output.getDataAsFloatArray(), 0);
    module.destroy();
  }

  @Test
  public void whatAModuleIs() throws Exception {
    try (Module module = Module.load(Models.path("rows"))) {
      assertArrayEquals(new String[] {"forward"}, module.getMethods());
      TensorInfo input = module.inputs("forward")[0];
      assertEquals(DType.FLOAT32, input.dtype);
      assertArrayEquals(new long[] {-1, 7}, input.shape);
      assertEquals(64, input.max[0]);
      assertEquals(1, module.outputs("forward").length);
      assertTrue(module.device(), module.device().length() > 0);
      assertTrue(Device.isVulkanAvailable());
      assertTrue(Arrays.stream(Device.all()).anyMatch(d -> d.name.equals(module.device())));
      assertTrue(Module.version(), Module.version().matches("\\d+\\.\\d+.*"));
    }
  }

  @Test
  public void dynamicSizes() throws Exception {
    try (Module module = Module.load(Models.path("rows"))) {
      float[] rows = Models.floatsOf("rows.in0"), want = Models.floatsOf("rows.out0");
      for (int n : new int[] {5, 1, 0, 3, 5}) {
        Tensor input = Tensor.fromBlob(Arrays.copyOf(rows, 7 * n), new long[] {n, 7});
        Tensor output = module.forward(IValue.from(input)).toTensor();
        assertArrayEquals(new long[] {n, 7}, output.shape());
        assertArrayEquals(Arrays.copyOf(want, 7 * n), output.getDataAsFloatArray(), 1e-6f); // another number of rows, another kernel
      }
    }
  }

  @Test
  public void severalTypesAndResults() throws Exception {
    try (Module module = Module.load(Models.path("pair"))) {
      Tensor x = Models.floats("pair.in0", 3, 1);
      Tensor n = Tensor.fromBlob(Models.bytes("pair.in1").asLongBuffer(), new long[] {3});
      Tensor on = Tensor.fromBlob(Models.bytes("pair.in2"), DType.BOOL, new long[] {1, 2});
      long[] wanted = new long[3];
      Models.bytes("pair.out1").asLongBuffer().get(wanted);
      Map<String, IValue> named = new HashMap<>();
      named.put("b", IValue.from(on));
      named.put("a", IValue.listFrom(n));
      for (IValue results :
          Arrays.asList(
              module.forward(IValue.from(x), IValue.from(n), IValue.from(on)),
              module.forward(IValue.listFrom(x, n, on)),
              module.runMethod("forward", IValue.tupleFrom(IValue.from(x)), IValue.dictStringKeyFrom(named)))) {
        assertArrayEquals(Models.floatsOf("pair.out0"), results.toTuple()[0].toTensor().getDataAsFloatArray(), 0);
        assertArrayEquals(wanted, results.toTuple()[1].toTensor().getDataAsLongArray());
      }
      EValue[] results = module.forward(EValue.from(x), EValue.from(n), EValue.from(on));
      assertArrayEquals(wanted, results[1].toTensor().getDataAsLongArray());

      n.buffer().clear();
      ((java.nio.LongBuffer) n.buffer()).put(1, 1L << 20);
      LapilliException failed =
          assertThrows(LapilliException.class, () -> module.forward(IValue.from(x), IValue.from(n), IValue.from(on)));
      assertEquals(LapilliException.Status.OUT_OF_RANGE, failed.status());
    }
  }

  @Test
  public void halfFloats() throws Exception {
    try (Module module = Module.load(Models.path("half"))) {
      Tensor x = Tensor.fromBlob(Models.bytes("half.in0").asShortBuffer(), DType.FLOAT16, new long[] {7});
      IValue[] results = module.forward(IValue.from(x)).toTuple();
      assertEquals(DType.FLOAT16, results[0].toTensor().dtype());
      assertEquals(DType.BFLOAT16, results[1].toTensor().dtype());
      assertArrayEquals(
          new float[] {0, -0.75f, 32752, 0, Float.POSITIVE_INFINITY, Float.NaN, 0.049987793f},
          results[0].toTensor().getDataAsFloatArray(),
          0);
      assertArrayEquals(
          new float[] {1, -0.5f, 65536, 1, Float.POSITIVE_INFINITY, Float.NaN, 1.1015625f}, results[1].toTensor().getDataAsFloatArray(), 0);
      short[] bits = new short[7];
      Models.bytes("half.out1").asShortBuffer().get(bits);
      assertArrayEquals(bits, results[1].toTensor().getDataAsShortArray());
    }
  }

  @Test
  public void states() throws Exception {
    try (Module module = Module.load(Models.path("count"))) {
      Tensor x = Tensor.fromBlob(new float[] {1, 2, 3}, new long[] {3});
      for (int i = 1; i < 4; ++i)
        assertArrayEquals(new float[] {i, 2 * i, 3 * i}, module.forward(IValue.from(x)).toTensor().getDataAsFloatArray(), 0);
      module.reset();
      assertArrayEquals(new float[] {1, 2, 3}, module.forward(IValue.from(x)).toTensor().getDataAsFloatArray(), 0);
    }
  }

  @Test
  public void fromMemory() throws Exception {
    ByteBuffer file = Models.bytes("net.lap");
    try (Module module = Module.load(file, Device.CPU)) {
      assertArrayEquals(
          Models.floatsOf("net.out0"), module.forward(IValue.from(picture())).toTensor().getDataAsFloatArray(), 0);
    }
    ByteBuffer shifted = ByteBuffer.allocateDirect(file.capacity() + 8);
    shifted.position(8);
    shifted.put(file);
    shifted.position(8);
    try (Module module = Module.load(shifted, Device.VULKAN)) {
      assertEquals(1, module.getMethods().length);
    }
    assertThrows(IllegalArgumentException.class, () -> Module.load(ByteBuffer.allocate(100), Device.VULKAN));
    assertThrows(LapilliException.class, () -> Module.load(ByteBuffer.allocateDirect(0), Device.VULKAN));
  }

  // -- errors

  private static void refuses(LapilliException.Status status, String sentence, org.junit.function.ThrowingRunnable what) {
    LapilliException failed = assertThrows(LapilliException.class, what);
    assertEquals(failed.getMessage(), status, failed.status());
    assertTrue(failed.getMessage(), failed.getMessage().contains(sentence));
  }

  @Test
  public void errorsHaveThePlayersSentence() throws Exception {
    refuses(LapilliException.Status.IO_ERROR, "/nonexistent/ü\ud83c\udf0b", () -> Module.load("/nonexistent/ü\ud83c\udf0b"));
    refuses(LapilliException.Status.INVALID_FILE, "not a Lapilli program", () -> Module.load(Models.path("net").replace(".lap", ".in0")));
    refuses(LapilliException.Status.INVALID_ARGUMENT, "no plan \"x\"", () -> Module.load(Models.path("net"), Device.VULKAN, "x"));
    assertThrows(IllegalArgumentException.class, () -> Module.load((String) null));
    assertThrows(IllegalArgumentException.class, () -> Module.load("a\0b"));
    Path damaged = Files.createTempFile("damaged", ".lap");
    byte[] bytes = Files.readAllBytes(java.nio.file.Paths.get(Models.path("net")));
    bytes[bytes.length - 9] ^= 1;
    Files.write(damaged, bytes);
    refuses(LapilliException.Status.INVALID_FILE, "checksum", () -> Module.load(damaged.toString()));
    Files.delete(damaged);
    try (Module module = Module.load(Models.path("net"))) {
      refuses(LapilliException.Status.INVALID_ARGUMENT, "(1, 3, 31, 32)",
          () -> module.forward(IValue.from(Tensor.zeros(new long[] {1, 3, 31, 32}, DType.FLOAT32))));
      refuses(LapilliException.Status.INVALID_ARGUMENT, "int32",
          () -> module.forward(IValue.from(Tensor.zeros(new long[] {1, 3, 32, 32}, DType.INT32))));
      refuses(LapilliException.Status.INVALID_ARGUMENT, "input", module::forward);
      long[] twenty = new long[20];
      Arrays.fill(twenty, 1);
      refuses(LapilliException.Status.INVALID_ARGUMENT, "20", () -> module.forward(IValue.from(Tensor.zeros(twenty, DType.FLOAT32))));
      assertThrows(IllegalArgumentException.class, () -> module.forward(IValue.from("text")));
      assertThrows(IllegalArgumentException.class, () -> module.forward((IValue) null));
      assertThrows(IllegalArgumentException.class, () -> module.runMethod("backward"));
      assertThrows(IllegalArgumentException.class, () -> module.forward(IValue.from(1L)));
      Tensor last = Tensor.fromBlob(Tensor.allocateFloatBuffer(3 * 32 * 32), new long[] {1, 3, 32, 32}, MemoryFormat.CHANNELS_LAST);
      assertThrows(IllegalArgumentException.class, () -> module.forward(IValue.from(last)));
      assertArrayEquals( // none of that did any harm
          Models.floatsOf("net.out0"), module.forward(IValue.from(picture())).toTensor().getDataAsFloatArray(), 0);
    }
  }

  // -- the end

  @Test
  public void closedTwiceAndUsedAfterwards() throws Exception {
    Module module = Module.load(Models.path("net"));
    Tensor input = picture();
    Binding binding = module.bind(input);
    Tensor output = module.forward(IValue.from(input)).toTensor();
    module.close();
    module.close();
    module.destroy();
    IllegalStateException failed = assertThrows(IllegalStateException.class, () -> module.forward(IValue.from(input)));
    assertTrue(failed.getMessage(), failed.getMessage().contains("closed"));
    assertThrows(IllegalStateException.class, () -> module.bind(input));
    assertThrows(IllegalStateException.class, module::deviceMemory);
    assertThrows(IllegalStateException.class, module::reset);
    assertThrows(IllegalStateException.class, binding::run);
    binding.close();
    binding.close();
    assertThrows(IllegalStateException.class, binding::run);
    assertArrayEquals(Models.floatsOf("net.out0"), output.getDataAsFloatArray(), 0); // a tensor is not the module's
  }

  @Test
  public void whatIsForgottenIsFreed() throws Exception {
    long[] before = Native.alive();
    for (int i = 0; i < 5; ++i) Module.load(Models.path("rows")).forward(IValue.from(Tensor.zeros(new long[] {i, 7}, DType.FLOAT32)));
    for (int i = 0; i < 100 && (Native.alive()[0] > before[0] || Native.alive()[1] > before[1]); ++i) {
      System.gc();
      Thread.sleep(20);
    }
    assertTrue(Arrays.toString(Native.alive()), Native.alive()[0] <= before[0] && Native.alive()[1] <= before[1]);
  }

  // -- reuse

  @Test
  public void aBindingAllocatesNothing() throws Exception {
    try (Module module = Module.load(Models.path("net")); Binding binding = module.bind(picture())) {
      FloatBuffer input = (FloatBuffer) binding.inputs[0].buffer();
      float[] want = Models.floatsOf("net.out0"), got = new float[10];
      com.sun.management.ThreadMXBean threads = (com.sun.management.ThreadMXBean) ManagementFactory.getThreadMXBean();
      long id = Thread.currentThread().getId();
      for (int i = 0; i < 20; ++i) binding.run();
      threads.getThreadAllocatedBytes(id);
      long buffers = Tensor.allocatedBuffers(), device = module.deviceMemory();
      long[] alive = Native.alive();
      long heap = threads.getThreadAllocatedBytes(id);
      for (int i = 0; i < 100; ++i) binding.run();
      long used = threads.getThreadAllocatedBytes(id) - heap;
      assertTrue(used + " bytes of Java's heap in 100 runs", used < 100); // the two calls that measure may take some, once
      assertEquals(buffers, Tensor.allocatedBuffers());
      assertEquals(device, module.deviceMemory());
      assertArrayEquals(alive, Native.alive());
      binding.outputs()[0].readInto(got);
      assertArrayEquals(want, got, 0);

      input.put(0, input.get(0) + 100); // the next run sees what is in the buffer
      binding.run();
      binding.outputs()[0].readInto(got);
      assertNotEquals(want[0], got[0], 1e-6f);
    }
  }

  @Test
  public void forwardWithTheSameTensorBindsOnce() throws Exception {
    try (Module module = Module.load(Models.path("net"))) {
      IValue input = IValue.from(picture());
      Tensor first = module.forward(input).toTensor();
      long[] alive = Native.alive();
      long buffers = Tensor.allocatedBuffers(), device = module.deviceMemory();
      for (int i = 0; i < 50; ++i) module.forward(input);
      assertEquals(buffers + 50, Tensor.allocatedBuffers()); // of the results, which are the caller's
      assertEquals(device, module.deviceMemory());
      assertArrayEquals(alive, Native.alive());
      ((FloatBuffer) input.toTensor().buffer()).put(0, 1000);
      assertFalse(Arrays.equals(first.getDataAsFloatArray(), module.forward(input).toTensor().getDataAsFloatArray()));
      assertArrayEquals(Models.floatsOf("net.out0"), first.getDataAsFloatArray(), 0); // not overwritten
    }
  }

  // -- threads

  @Test
  public void severalThreadsAndAClose() throws Exception {
    float[] want = Models.floatsOf("net.out0");
    ExecutorService pool = Executors.newFixedThreadPool(4);
    for (int round = 0; round < 3; ++round) {
      Module module = Module.load(Models.path("net"));
      Tensor shared = picture();
      Binding binding = module.bind(shared);
      List<Future<Integer>> done = new ArrayList<>();
      for (int t = 0; t < 4; ++t) {
        final boolean own = t % 2 == 0, bound = t == 3;
        done.add(
            pool.submit(
                () -> {
                  Tensor input = own ? picture() : shared;
                  for (int i = 0; ; ++i) {
                    float[] got;
                    try {
                      if (bound) binding.run();
                      got = module.forward(IValue.from(input)).toTensor().getDataAsFloatArray();
                    } catch (IllegalStateException closed) {
                      return i;
                    }
                    assertArrayEquals(want, got, 0);
                  }
                }));
      }
      Thread.sleep(100);
      module.close();
      int runs = 0;
      for (Future<Integer> one : done) runs += one.get();
      assertTrue("runs before the close: " + runs, runs > 0);
      binding.close();
    }
    pool.shutdown();
  }

  /** A device that is wrong on purpose needs a driver of its own: tests/runtime/test_phones.py. */
  @Test
  public void firstRunCheck() throws Exception {
    Path folder = Files.createTempDirectory("verdicts");
    Module.setCacheDir(folder.toString());
    try {
      for (int start = 0; start < 2; ++start)
        try (Module module = Module.load(Models.path("net"), Device.VULKAN, Verify.FIRST_RUN)) {
          assertEquals("", module.warning());
          Tensor output = module.forward(IValue.from(picture())).toTensor();
          assertArrayEquals(Models.floatsOf("net.out0"), output.getDataAsFloatArray(), 0);
        }
      assertEquals(1, Files.list(folder.resolve("verdicts")).count());
      try (Module module = Module.load(Models.bytes("net.lap"), Device.VULKAN, Verify.FIRST_RUN)) {
        assertEquals("", module.warning()); // the same program, from memory
      }
      assertEquals(1, Files.list(folder.resolve("verdicts")).count());
      assertThrows(IllegalArgumentException.class, () -> Module.load(Models.path("net"), Device.VULKAN, (Verify) null));
    } finally {
      Module.setCacheDir(null);
    }
  }
}
