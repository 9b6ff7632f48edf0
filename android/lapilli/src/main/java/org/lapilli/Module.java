package org.lapilli;

import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.concurrent.atomic.AtomicReference;

/**
 * A compiled model on a Vulkan device: a .lap file, or a .pt file of optimize_for_mobile(backend="vulkan") with the program inside.
 *
 * <pre>
 * Module module = Module.load("model.lap", Device.VULKAN);
 * FloatBuffer buffer = Tensor.allocateFloatBuffer(1 * 3 * 224 * 224);
 * Tensor input = Tensor.fromBlob(buffer, new long[] {1, 3, 224, 224});
 * Tensor output = module.forward(IValue.from(input)).toTensor();
 * </pre>
 *
 * <p>All methods may be called from any thread, also at the same time. Close it, or leave it to the garbage collector; a call after
 * close() throws IllegalStateException, and one that runs meanwhile ends as usual. Failures in the player are LapilliException.
 */
public final class Module implements AutoCloseable {
  private static volatile String cacheDir;

  private final Handle handle;
  private final String[] methods;
  private final TensorInfo[][] inputs;
  private final TensorInfo[][] outputs;
  private final String device;
  private final String warning;
  private final AtomicReference<Binding> last = new AtomicReference<>(); // of forward, when no thread runs it

  private Module(String path, ByteBuffer memory, Device device, String plan, Verify verify) {
    long address =
        Native.load(
            Native.utf8(path),
            memory,
            Native.utf8(device.wanted()),
            Native.utf8(plan),
            Native.utf8(cacheDir),
            verify == Verify.FIRST_RUN);
    handle = Handle.of(this, address, "Module", Native::destroy);
    methods = new String[Native.methods(address)];
    inputs = new TensorInfo[methods.length][];
    outputs = new TensorInfo[methods.length][];
    for (int m = 0; m < methods.length; ++m) {
      methods[m] = Native.methodName(address, m);
      long[] counts = Native.counts(address, m);
      inputs[m] = specs(address, m, false, (int) counts[0]);
      outputs[m] = specs(address, m, true, (int) counts[1]);
    }
    this.device = Native.programDevice(address)[0];
    warning = Native.warning(address);
  }

  private static TensorInfo[] specs(long program, int method, boolean output, int count) {
    TensorInfo[] found = new TensorInfo[count];
    for (int i = 0; i < count; ++i)
      found[i] = new TensorInfo(Native.specName(program, method, output, i), Native.spec(program, method, output, i));
    return found;
  }

  /** The folder in which the driver's compiled kernels are kept from start to start: on Android context.getCodeCacheDir(). */
  public static void setCacheDir(String folder) {
    cacheDir = folder;
  }

  /** The version of the player. */
  public static String version() {
    return Native.version();
  }

  public static Module load(String path) {
    return load(path, Device.VULKAN);
  }

  public static Module load(String path, Device device) {
    return load(path, device, Verify.STRUCTURE);
  }

  /** plan: the name of the plan to use; null: the first that the device can run. */
  public static Module load(String path, Device device, String plan) {
    if (path == null || device == null) throw new IllegalArgumentException("The path or the device is null.");
    return new Module(path, null, device, plan, Verify.STRUCTURE);
  }

  /** verify: what is checked beside the file's checksum and structure. warning() says what was found. */
  public static Module load(String path, Device device, Verify verify) {
    if (path == null || device == null || verify == null)
      throw new IllegalArgumentException("The path, the device or what to verify is null.");
    return new Module(path, null, device, null, verify);
  }

  /** From a direct buffer, of which the bytes from position to limit are the file; it is not needed afterwards. */
  public static Module load(ByteBuffer file, Device device) {
    return load(file, device, Verify.STRUCTURE);
  }

  public static Module load(ByteBuffer file, Device device, Verify verify) {
    if (file == null || device == null || verify == null)
      throw new IllegalArgumentException("The buffer, the device or what to verify is null.");
    if (!file.isDirect())
      throw new IllegalArgumentException("The buffer is not direct. Make it with ByteBuffer.allocateDirect, or map the file.");
    return new Module(null, file.slice(), device, null, verify);
  }

  // -- running

  /** Without arguments. */
  public IValue forward() {
    return forward(new IValue[0]);
  }

  /**
   * The result of the method "forward", or of the first one where none has that name: a tensor, or a tuple where there are several.
   * With the same tensor objects as before nothing is allocated but the result's memory; bind() avoids that, too.
   */
  public IValue forward(IValue... arguments) {
    return run(first(), arguments);
  }

  public IValue runMethod(String name, IValue... arguments) {
    return run(index(name), arguments);
  }

  /** As ExecuTorch has it. */
  public EValue[] forward(EValue... arguments) {
    return execute(methods[first()], arguments);
  }

  public EValue[] execute(String name, EValue... arguments) {
    int method = index(name);
    IValue[] values = new IValue[arguments.length];
    for (int i = 0; i < values.length; ++i) {
      if (arguments[i] == null) throw new IllegalArgumentException("Argument " + i + " is null; use EValue.optionalNone().");
      values[i] = arguments[i].asIValue();
    }
    Tensor[] results = run(method, IValue.flat(values, inputs[method]));
    EValue[] all = new EValue[results.length];
    for (int i = 0; i < all.length; ++i) all[i] = EValue.from(results[i]);
    return all;
  }

  private IValue run(int method, IValue[] arguments) {
    for (int i = 0; i < arguments.length; ++i)
      if (arguments[i] == null) throw new IllegalArgumentException("Argument " + i + " is null; use IValue.optionalNull().");
    Tensor[] results = run(method, IValue.flat(arguments, inputs[method]));
    if (results.length == 1) return IValue.from(results[0]);
    IValue[] all = new IValue[results.length];
    for (int i = 0; i < all.length; ++i) all[i] = IValue.from(results[i]);
    return IValue.tupleFrom(all);
  }

  private Tensor[] run(int method, Tensor[] tensors) {
    Binding binding = last.getAndSet(null);
    if (binding == null || !binding.fits(method, tensors)) {
      if (binding != null) binding.close();
      binding = new Binding(this, handle, method, tensors);
    }
    try {
      return binding.runToNew();
    } finally {
      if (!last.compareAndSet(null, binding)) binding.close(); // another thread has left one
    }
  }

  /** A run of "forward" on these tensors, again and again, without allocation. */
  public Binding bind(Tensor... tensors) {
    return bindMethod(methods[first()], tensors);
  }

  public Binding bindMethod(String name, Tensor... tensors) {
    Binding binding = new Binding(this, handle, index(name), tensors);
    try {
      binding.attachNew();
    } catch (RuntimeException | Error failed) {
      binding.close();
      throw failed;
    }
    return binding;
  }

  // -- what it is

  public String[] getMethods() {
    return methods.clone();
  }

  public TensorInfo[] inputs(String method) {
    return inputs[index(method)].clone();
  }

  public TensorInfo[] outputs(String method) {
    return outputs[index(method)].clone();
  }

  /** The name of the Vulkan device. */
  public String device() {
    return device;
  }

  /** A text that was stored in the file under a name; null where there is none. */
  public String metadata(String name) {
    if (name == null) throw new IllegalArgumentException("The name is null.");
    long program = handle.enter();
    try {
      return Native.metadata(program, Native.utf8(name));
    } finally {
      handle.exit();
    }
  }

  /** Of LlmModule: a writer, which keeps the program. */
  Handle writer(Object owner) {
    long program = handle.enter();
    try {
      return Handle.of(owner, Native.writer(program), "LlmModule", Native::destroyWriter);
    } finally {
      handle.exit();
    }
  }

  /** What Verify.FIRST_RUN found, as a sentence; empty: nothing, or it was not asked for. */
  public String warning() {
    return warning;
  }

  /** Bytes of device memory that the module and its runs have. */
  public long deviceMemory() {
    long program = handle.enter();
    try {
      return Native.memory(program)[5];
    } finally {
      handle.exit();
    }
  }

  /** Sets the states of the module, if it has any, to their initial values. */
  public void reset() {
    long program = handle.enter();
    try {
      Native.reset(program);
    } finally {
      handle.exit();
    }
  }

  private int first() {
    for (int m = 0; m < methods.length; ++m) if (methods[m].equals("forward")) return m;
    return 0;
  }

  private int index(String name) {
    for (int m = 0; m < methods.length; ++m) if (methods[m].equals(name)) return m;
    throw new IllegalArgumentException("The module has no method \"" + name + "\"; it has " + Arrays.toString(methods) + ".");
  }

  /** The same as close(), as org.pytorch names it. */
  public void destroy() {
    close();
  }

  @Override
  public void close() {
    Binding binding = last.getAndSet(null);
    if (binding != null) binding.close();
    handle.close();
  }
}
