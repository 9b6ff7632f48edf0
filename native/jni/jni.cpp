// The natives of org.lapilli.Native, over the C ABI. Texts come as UTF-8 bytes and go as UTF-16, because JNI's own "UTF-8" is another
// one, with which a virtual machine may abort. Java ensures that handles are alive (Handle.java), and that buffers live as long as
// the binding that has their addresses.

#include "lapilli.h"

#include <jni.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace {

// A run of one method whose tensors lie in direct buffers of Java: nothing is allocated, looked up or converted when it runs.
struct Binding {
  uint32_t method = 0;
  std::vector<lapilli_tensor> inputs, outputs;
  std::vector<lapilli_tensor> given; // outputs as they were attached: a run writes into its argument
};

jclass exception_class = nullptr; // org.lapilli.LapilliException
jmethodID make_exception = nullptr;
std::atomic<int64_t> programs{0}, bindings{0}, writers{0}; // alive, for tests

// UTF-16 of UTF-8; what is no UTF-8 becomes U+FFFD.
std::u16string utf16(std::string_view text) {
  std::u16string out;
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i++]);
    const uint32_t more = first < 0x80                    ? 0
                          : first >= 0xc2 && first < 0xe0 ? 1
                          : first >> 4 == 0xe             ? 2
                          : first >= 0xf0 && first < 0xf5 ? 3
                                                          : 4;
    if (more == 4) {
      out += u'\ufffd';
      continue;
    }
    uint32_t code = more == 0 ? first : first & (0x3fu >> more);
    uint32_t seen = 0;
    for (; seen < more && i < text.size() && (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80; ++seen)
      code = code << 6 | (static_cast<unsigned char>(text[i++]) & 0x3fu);
    constexpr std::array<uint32_t, 4> least{0, 0x80, 0x800, 0x10000};
    if (seen < more || code < least[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
      out += u'\ufffd';
    else if (code < 0x10000)
      out += static_cast<char16_t>(code);
    else {
      out += static_cast<char16_t>(0xd7c0 + (code >> 10));
      out += static_cast<char16_t>(0xdc00 + (code & 0x3ff));
    }
  }
  return out;
}

jstring java_text(JNIEnv* env, std::string_view text) {
  const std::u16string wide = utf16(text);
  return env->NewString(reinterpret_cast<const jchar*>(wide.data()), static_cast<jsize>(wide.size()));
}

void throw_java(JNIEnv* env, lapilli_status status, std::string_view message) {
  if (env->ExceptionCheck() == JNI_TRUE)
    return;
  jstring text = java_text(env, message);
  if (text == nullptr)
    return; // Java's own OutOfMemoryError is pending
  jobject exception = env->NewObject(exception_class, make_exception, static_cast<jint>(status), text);
  if (exception != nullptr)
    env->Throw(static_cast<jthrowable>(exception));
}

// A pending exception of Java, which is not to be replaced.
struct Pending {};

void must(lapilli_status status) {
  if (status != LAPILLI_OK)
    throw status;
}
template <class T> T* must(T* pointer) {
  if (pointer == nullptr)
    throw Pending{};
  return pointer;
}

// What `f` returns, or a pending exception and zero.
template <class F> auto guarded(JNIEnv* env, F&& f) -> decltype(f()) {
  using Value = decltype(f());
  try {
    return f();
  } catch (const lapilli_status status) {
    throw_java(env, status, lapilli_last_error());
  } catch (const Pending&) {
  } catch (const std::bad_alloc&) {
    if (jclass error = env->FindClass("java/lang/OutOfMemoryError"))
      env->ThrowNew(error, "The machine is out of memory. Close other programs, or run smaller inputs.");
  } catch (...) {
    throw_java(env, LAPILLI_INTERNAL, "An unknown error occurred in the natives of org.lapilli.");
  }
  if constexpr (!std::is_void_v<Value>)
    return Value{};
}

template <class T> T* handle(jlong value) { return reinterpret_cast<T*>(static_cast<intptr_t>(value)); }
jlong number(void* pointer) { return static_cast<jlong>(reinterpret_cast<intptr_t>(pointer)); }

// A text of Java as UTF-8 with a zero at its end; null stays null.
struct Text {
  Text(JNIEnv* env, jbyteArray bytes) : there(bytes != nullptr) {
    if (!there)
      return;
    text.resize(static_cast<size_t>(env->GetArrayLength(bytes)));
    env->GetByteArrayRegion(bytes, 0, static_cast<jsize>(text.size()), reinterpret_cast<jbyte*>(text.data()));
  }
  const char* get() const { return there ? text.c_str() : nullptr; }
  bool there;
  std::string text;
};

jlongArray java_longs(JNIEnv* env, const std::vector<jlong>& values) {
  jlongArray array = must(env->NewLongArray(static_cast<jsize>(values.size())));
  env->SetLongArrayRegion(array, 0, static_cast<jsize>(values.size()), values.data());
  return array;
}

jlong load(JNIEnv* env, jclass, jbyteArray path, jobject memory, jbyteArray device, jbyteArray plan, jbyteArray cache,
           jboolean first_run) {
  return guarded(env, [&]() -> jlong {
    const Text name(env, path), on(env, device), wanted(env, plan), folder(env, cache);
    lapilli_load_options options{};
    options.device = on.get();
    options.plan = wanted.get();
    options.cache_dir = folder.get();
    options.first_run = first_run == JNI_TRUE ? 1 : 0;
    lapilli_program* program = nullptr;
    if (memory != nullptr)
      must(lapilli_load_memory(env->GetDirectBufferAddress(memory),
                               static_cast<uint64_t>(env->GetDirectBufferCapacity(memory)), &options, &program));
    else
      must(lapilli_load(name.get(), &options, &program));
    ++programs;
    return number(program);
  });
}

jstring warning(JNIEnv* env, jclass, jlong program) {
  return guarded(env, [&] { return java_text(env, lapilli_program_warning(handle<lapilli_program>(program))); });
}

void destroy(JNIEnv*, jclass, jlong program) {
  lapilli_destroy(handle<lapilli_program>(program));
  --programs;
}

jint methods(JNIEnv*, jclass, jlong program) {
  return static_cast<jint>(lapilli_method_count(handle<lapilli_program>(program)));
}

jstring method_name(JNIEnv* env, jclass, jlong program, jint method) {
  return guarded(env, [&] {
    lapilli_method_info info{};
    must(lapilli_method(handle<lapilli_program>(program), static_cast<uint32_t>(method), &info));
    return java_text(env, info.name);
  });
}

// {inputs, outputs}
jlongArray counts(JNIEnv* env, jclass, jlong program, jint method) {
  return guarded(env, [&] {
    lapilli_method_info info{};
    must(lapilli_method(handle<lapilli_program>(program), static_cast<uint32_t>(method), &info));
    return java_longs(env, {info.inputs, info.outputs});
  });
}

lapilli_spec spec_of(jlong program, jint method, jboolean output, jint index) {
  lapilli_spec spec{};
  must((output == JNI_TRUE ? lapilli_output_spec : lapilli_input_spec)(
      handle<lapilli_program>(program), static_cast<uint32_t>(method), static_cast<uint32_t>(index), &spec));
  return spec;
}

jstring spec_name(JNIEnv* env, jclass, jlong program, jint method, jboolean output, jint index) {
  return guarded(env, [&] { return java_text(env, spec_of(program, method, output, index).name); });
}

// {dtype, then size, least and most of each axis}
jlongArray spec(JNIEnv* env, jclass, jlong program, jint method, jboolean output, jint index) {
  return guarded(env, [&] {
    const lapilli_spec found = spec_of(program, method, output, index);
    std::vector<jlong> values{found.dtype};
    for (uint32_t axis = 0; axis < found.rank; ++axis)
      values.insert(values.end(), {found.shape[axis], found.min[axis], found.max[axis]});
    return java_longs(env, values);
  });
}

// The address and size of each buffer; a buffer of no elements may have no address.
void bind_memory(JNIEnv* env, jobjectArray buffers, std::vector<lapilli_tensor>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    jobject buffer = env->GetObjectArrayElement(buffers, static_cast<jsize>(i));
    tensors[i].data = env->GetDirectBufferAddress(buffer);
    env->DeleteLocalRef(buffer);
  }
}

// tensors: of each input its dtype, bytes, rank and shape.
jlong bind(JNIEnv* env, jclass, jlong program, jint method, jobjectArray buffers, jlongArray tensors) {
  return guarded(env, [&]() -> jlong {
    auto* on = handle<lapilli_program>(program);
    lapilli_method_info info{};
    must(lapilli_method(on, static_cast<uint32_t>(method), &info));
    std::vector<jlong> words(static_cast<size_t>(env->GetArrayLength(tensors)));
    env->GetLongArrayRegion(tensors, 0, static_cast<jsize>(words.size()), words.data());
    auto binding = std::make_unique<Binding>();
    binding->method = static_cast<uint32_t>(method);
    binding->inputs.resize(static_cast<size_t>(env->GetArrayLength(buffers)));
    size_t at = 0;
    for (lapilli_tensor& input : binding->inputs) {
      input.dtype = static_cast<uint32_t>(words[at]);
      input.size = static_cast<uint64_t>(words[at + 1]);
      input.rank = static_cast<uint32_t>(words[at + 2]);
      std::copy_n(words.data() + at + 3, std::min<size_t>(input.rank, LAPILLI_MAX_RANK), input.shape);
      at += 3 + input.rank;
    }
    bind_memory(env, buffers, binding->inputs);
    std::vector<int64_t> symbols(info.symbols);
    const auto n_inputs = static_cast<uint32_t>(binding->inputs.size());
    must(lapilli_symbols(on, binding->method, binding->inputs.data(), n_inputs, symbols.data(), info.symbols));
    binding->outputs.resize(info.outputs);
    must(lapilli_output_shapes(on, binding->method, symbols.data(), info.symbols, binding->outputs.data(),
                               info.outputs));
    ++bindings;
    return number(binding.release());
  });
}

// Of each output its dtype, bytes, rank and shape.
jlongArray outputs(JNIEnv* env, jclass, jlong binding) {
  return guarded(env, [&] {
    std::vector<jlong> words;
    for (const lapilli_tensor& output : handle<Binding>(binding)->outputs) {
      words.insert(words.end(), {static_cast<jlong>(output.dtype), static_cast<jlong>(output.size),
                                 static_cast<jlong>(output.rank)});
      words.insert(words.end(), output.shape, output.shape + output.rank);
    }
    return java_longs(env, words);
  });
}

// The buffers have the sizes that `outputs` gave.
void attach(JNIEnv* env, jclass, jlong binding, jobjectArray buffers) {
  guarded(env, [&] {
    auto& bound = *handle<Binding>(binding);
    bind_memory(env, buffers, bound.outputs);
    bound.given = bound.outputs;
  });
}

void run(JNIEnv* env, jclass, jlong program, jlong binding) {
  auto& bound = *handle<Binding>(binding);
  std::copy(bound.given.begin(), bound.given.end(), bound.outputs.begin());
  const lapilli_status status = lapilli_run_sync(handle<lapilli_program>(program), bound.method, bound.inputs.data(),
                                                 static_cast<uint32_t>(bound.inputs.size()), bound.outputs.data(),
                                                 static_cast<uint32_t>(bound.outputs.size()));
  if (status != LAPILLI_OK)
    guarded(env, [&] { must(status); });
}

void unbind(JNIEnv*, jclass, jlong binding) {
  delete handle<Binding>(binding);
  --bindings;
}

void reset(JNIEnv* env, jclass, jlong program) {
  guarded(env, [&] { must(lapilli_reset(handle<lapilli_program>(program))); });
}

// {constants, states, arena, arena_sum, io, device_total}
jlongArray memory(JNIEnv* env, jclass, jlong program) {
  return guarded(env, [&] {
    lapilli_memory_info info{};
    must(lapilli_program_memory(handle<lapilli_program>(program), &info));
    std::vector<jlong> words;
    for (const uint64_t bytes : {info.constants, info.states, info.arena, info.arena_sum, info.io, info.device_total})
      words.push_back(static_cast<jlong>(bytes));
    return java_longs(env, words);
  });
}

jint device_count(JNIEnv* env, jclass) {
  return guarded(env, []() -> jint {
    uint32_t count = 0;
    must(lapilli_device_count(&count));
    return static_cast<jint>(count);
  });
}

// {name, driver, version of Vulkan}, or, with a program, those of its device.
jobjectArray device_texts(JNIEnv* env, const lapilli_device_info& info) {
  jobjectArray texts = must(env->NewObjectArray(3, must(env->FindClass("java/lang/String")), nullptr));
  jsize index = 0;
  for (const char* text : {info.name, info.driver, info.api_version}) {
    jstring made = must(java_text(env, text));
    env->SetObjectArrayElement(texts, index++, made);
    env->DeleteLocalRef(made);
  }
  return texts;
}

jobjectArray device(JNIEnv* env, jclass, jint index) {
  return guarded(env, [&] {
    lapilli_device_info info{};
    must(lapilli_device(static_cast<uint32_t>(index), &info));
    return device_texts(env, info);
  });
}

// {lapilli_device_type, vendor, bytes of memory}
jlongArray device_numbers(JNIEnv* env, jclass, jint index) {
  return guarded(env, [&] {
    lapilli_device_info info{};
    must(lapilli_device(static_cast<uint32_t>(index), &info));
    return java_longs(env, {info.type, info.vendor_id, static_cast<jlong>(info.memory)});
  });
}

jobjectArray program_device(JNIEnv* env, jclass, jlong program) {
  return guarded(env, [&] {
    lapilli_device_info info{};
    must(lapilli_program_device(handle<lapilli_program>(program), &info));
    return device_texts(env, info);
  });
}

jstring version(JNIEnv* env, jclass) {
  return guarded(env, [&] { return java_text(env, lapilli_version()); });
}

jstring metadata(JNIEnv* env, jclass, jlong program, jbyteArray name) {
  return guarded(env, [&]() -> jstring {
    const Text key(env, name);
    const char* value = lapilli_metadata(handle<lapilli_program>(program), key.get());
    return value != nullptr ? java_text(env, value) : nullptr;
  });
}

jlong writer(JNIEnv* env, jclass, jlong program) {
  return guarded(env, [&] {
    lapilli_writer* made = nullptr;
    must(lapilli_writer_create(handle<lapilli_program>(program), &made));
    ++writers;
    return number(made);
  });
}

void destroy_writer(JNIEnv*, jclass, jlong writer) {
  lapilli_writer_destroy(handle<lapilli_writer>(writer));
  --writers;
}

// {context, words, tokens that were computed}
jlongArray about_writer(JNIEnv* env, jclass, jlong writer) {
  return guarded(env, [&] {
    lapilli_writer_info info{};
    must(lapilli_writer_describe(handle<lapilli_writer>(writer), &info));
    return java_longs(env, {info.context, info.words, static_cast<jlong>(info.read)});
  });
}

// limits: {temperature, top_p, min_p, repetition_penalty}
void begin(JNIEnv* env, jclass, jlong writer, jintArray tokens, jfloatArray limits, jint top_k, jint seed) {
  guarded(env, [&] {
    std::vector<jint> given(static_cast<size_t>(env->GetArrayLength(tokens)));
    env->GetIntArrayRegion(tokens, 0, static_cast<jsize>(given.size()), given.data());
    std::array<jfloat, 4> of{};
    env->GetFloatArrayRegion(limits, 0, static_cast<jsize>(of.size()), of.data());
    const lapilli_sampling sampling{of[0], of[1], of[2], of[3], top_k, seed};
    must(lapilli_writer_begin(handle<lapilli_writer>(writer), given.data(), given.size(), &sampling));
  });
}

jint next(JNIEnv* env, jclass, jlong writer) {
  return guarded(env, [&] {
    int32_t token = 0;
    must(lapilli_writer_next(handle<lapilli_writer>(writer), &token, nullptr));
    return static_cast<jint>(token);
  });
}

// {programs, bindings, writers} that are alive
jlongArray alive(JNIEnv* env, jclass) {
  return guarded(env, [&] { return java_longs(env, {programs.load(), bindings.load(), writers.load()}); });
}

template <class F> JNINativeMethod native(const char* name, const char* signature, F* function) {
  return {const_cast<char*>(name), const_cast<char*>(signature), reinterpret_cast<void*>(function)};
}

} // namespace

extern "C" JNIEXPORT jint JNICALL JNI_OnLoad(JavaVM* machine, void*) {
  JNIEnv* env = nullptr;
  if (machine->GetEnv(reinterpret_cast<void**>(&env), JNI_VERSION_1_6) != JNI_OK)
    return JNI_ERR;
  jclass error = env->FindClass("org/lapilli/LapilliException");
  jclass natives = error != nullptr ? env->FindClass("org/lapilli/Native") : nullptr;
  if (natives == nullptr)
    return JNI_ERR;
  exception_class = static_cast<jclass>(env->NewGlobalRef(error));
  make_exception = env->GetMethodID(error, "<init>", "(ILjava/lang/String;)V");
  if (exception_class == nullptr || make_exception == nullptr)
    return JNI_ERR;
  const JNINativeMethod table[] = {
      native("load", "([BLjava/nio/ByteBuffer;[B[B[BZ)J", load),
      native("warning", "(J)Ljava/lang/String;", warning),
      native("destroy", "(J)V", destroy),
      native("methods", "(J)I", methods),
      native("methodName", "(JI)Ljava/lang/String;", method_name),
      native("counts", "(JI)[J", counts),
      native("specName", "(JIZI)Ljava/lang/String;", spec_name),
      native("spec", "(JIZI)[J", spec),
      native("bind", "(JI[Ljava/nio/Buffer;[J)J", bind),
      native("outputs", "(J)[J", outputs),
      native("attach", "(J[Ljava/nio/Buffer;)V", attach),
      native("run", "(JJ)V", run),
      native("unbind", "(J)V", unbind),
      native("reset", "(J)V", reset),
      native("memory", "(J)[J", memory),
      native("deviceCount", "()I", device_count),
      native("device", "(I)[Ljava/lang/String;", device),
      native("deviceNumbers", "(I)[J", device_numbers),
      native("programDevice", "(J)[Ljava/lang/String;", program_device),
      native("version", "()Ljava/lang/String;", version),
      native("metadata", "(J[B)Ljava/lang/String;", metadata),
      native("writer", "(J)J", writer),
      native("destroyWriter", "(J)V", destroy_writer),
      native("aboutWriter", "(J)[J", about_writer),
      native("begin", "(J[I[FII)V", begin),
      native("next", "(J)I", next),
      native("alive", "()[J", alive),
  };
  return env->RegisterNatives(natives, table, static_cast<jint>(std::size(table))) == JNI_OK ? JNI_VERSION_1_6
                                                                                             : JNI_ERR;
}
