// The C ABI of streams.

#include "api/api.h"
#include "api/devices.h"
#include "base/fork.h"
#include "core/inputs.h"
#include "core/stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

struct lapilli_stream {
  std::shared_ptr<lapilli::Stream> stream;
};

using namespace lapilli;

namespace {

Stream& checked(lapilli_stream* stream) {
  need(stream, "stream");
  refuse_in_child();
  return *stream->stream;
}

lapilli_buffer& checked(lapilli_buffer* buffer) {
  need(buffer, "buffer");
  refuse_in_child();
  return *buffer;
}

// `head`: method and numbers of symbols, inputs and outputs; `words`: the symbols and slices. `made` is where a slice
// without a buffer is.
void enqueue_packed(Stream& stream, lapilli_program* program, std::span<const int64_t, 4> head, const char* words,
                    lapilli_buffer* made) {
  need(program, "program");
  constexpr int64_t most = 1 << 16;
  for (const int64_t count : head)
    if (count < 0 || count > most)
      fail(LAPILLI_INVALID_ARGUMENT, "The packed method or number of symbols, inputs or outputs is ", count, ".");
  const auto symbols = static_cast<size_t>(head[1]), slices = static_cast<size_t>(head[2] + head[3]);
  thread_local std::vector<int64_t> values;
  thread_local std::vector<lapilli_slice> places;
  static_assert(sizeof(lapilli_slice) == 2 * sizeof(int64_t) || sizeof(void*) == 4);
  values.resize(symbols + 2 * slices);
  std::memcpy(values.data(), words, values.size() * sizeof(int64_t));
  places.resize(slices);
  for (size_t i = 0; i < slices; ++i) {
    auto* const buffer = reinterpret_cast<lapilli_buffer*>(static_cast<intptr_t>(values[symbols + 2 * i]));
    places[i] = {buffer != nullptr ? buffer : made, static_cast<uint64_t>(values[symbols + 2 * i + 1])};
  }
  stream.enqueue(program->program, static_cast<uint32_t>(head[0]), std::span(values).first(symbols),
                 static_cast<size_t>(head[2]), places);
}

// The tensor as a check of shapes wants it. Its data is not looked at.
lapilli_tensor as_tensor(const lapilli_device_tensor& from, const char* what, size_t index) {
  lapilli_tensor tensor{};
  if (from.buffer == nullptr)
    fail(LAPILLI_INVALID_ARGUMENT, what, " ", index, " has no buffer.");
  if (from.rank > max_rank)
    fail(LAPILLI_INVALID_ARGUMENT, what, " ", index, " has ", from.rank, " dimensions; ", max_rank, " are the most.");
  if (from.dtype > static_cast<uint32_t>(DType::MAX))
    fail(LAPILLI_INVALID_ARGUMENT, what, " ", index, " has the unknown dtype ", from.dtype, ".");
  std::copy_n(from.shape, from.rank, tensor.shape);
  tensor.data = from.buffer;
  tensor.rank = from.rank;
  tensor.dtype = from.dtype;
  const std::span<const int64_t> shape(from.shape, from.rank);
  if (std::ranges::any_of(shape, [](int64_t size) { return size < 0; }) ||
      !tensor_bytes(shape, static_cast<DType>(from.dtype), tensor.size))
    fail(LAPILLI_INVALID_ARGUMENT, what, " ", index, " has a size that is negative or too large.");
  return tensor;
}

static_assert(static_cast<int>(hal::Handle::native_buffer) == LAPILLI_MEMORY_VULKAN_BUFFER &&
              static_cast<int>(hal::Handle::opaque_fd) == LAPILLI_MEMORY_OPAQUE_FD);

hal::Handle handle_kind(uint32_t kind) {
  if (kind > LAPILLI_MEMORY_VULKAN_BUFFER)
    fail(LAPILLI_INVALID_ARGUMENT, "There is no kind of memory ", kind, "; lapilli_memory_kind lists them.");
  return static_cast<hal::Handle>(kind);
}

// Destroys what was created for outputs, unless all went well.
class NewBuffers {
public:
  explicit NewBuffers(std::span<lapilli_device_tensor> outputs) : outputs_(outputs) { made_.reserve(outputs.size()); }
  ~NewBuffers() {
    for (const size_t i : made_)
      lapilli_buffer_destroy(std::exchange(outputs_[i].buffer, nullptr));
  }
  void create(Stream& stream, size_t output, uint64_t bytes) {
    outputs_[output].buffer = stream.create_buffer(bytes);
    outputs_[output].offset = 0;
    made_.push_back(output);
  }
  void keep() { made_.clear(); }

private:
  std::span<lapilli_device_tensor> outputs_;
  std::vector<size_t> made_;
};

void enqueue_tensors(Stream& stream, lapilli_program* handle, uint32_t method, std::span<const int64_t> sizes,
                     std::span<const lapilli_device_tensor> inputs, std::span<lapilli_device_tensor> outputs) {
  const Program& program = lapilli::checked(handle);
  std::vector<lapilli_tensor> given;
  for (size_t i = 0; i < inputs.size(); ++i)
    given.push_back(as_tensor(inputs[i], "Input", i));
  const SymbolValues symbols = program.check_shapes(method, {given, sizes});
  std::vector<lapilli_tensor> results(outputs.size());
  handle->program->output_tensors(method, symbols.used(), results);
  NewBuffers created(outputs);
  std::vector<lapilli_slice> slices;
  for (const lapilli_device_tensor& input : inputs)
    slices.push_back({input.buffer, input.offset});
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].buffer == nullptr)
      created.create(stream, i, results[i].size);
    slices.push_back({outputs[i].buffer, outputs[i].offset});
  }
  stream.enqueue(handle->program, method, symbols.used(), inputs.size(), slices);
  created.keep();
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::ranges::copy(results[i].shape, outputs[i].shape);
    outputs[i].rank = results[i].rank;
    outputs[i].dtype = results[i].dtype;
  }
}

} // namespace

lapilli_status lapilli_stream_create(const lapilli_load_options* options, lapilli_stream** stream) {
  return guarded_stream([&] {
    need(stream, "stream");
    const lapilli_load_options defaults{};
    *stream = new lapilli_stream{Stream::create(open_device(options != nullptr ? *options : defaults))};
  });
}

lapilli_status lapilli_program_stream(lapilli_program* program, lapilli_stream** stream) {
  return guarded_stream([&] {
    need(stream, "stream");
    *stream = new lapilli_stream{Stream::create(lapilli::checked(program).shared_device())};
  });
}

lapilli_status lapilli_stream_device(lapilli_stream* stream, lapilli_device_info* info) {
  return guarded_stream([&] {
    need(info, "info");
    const hal::Device& device = checked(stream).device();
    fill_device(device.capabilities, device.index, *info);
  });
}

void lapilli_stream_destroy(lapilli_stream* stream) {
  if (!has_streams || stream == nullptr || is_forked())
    return;
  lapilli_flush(stream); // buffers may live on, and what is queued may change states of a program
  delete stream;
}

lapilli_status lapilli_stream_info(lapilli_stream* stream, char** json) {
  return guarded_part < has_streams && has_json > (has_streams ? "JSON" : "STREAMS", [&] {
                                         need(json, "json");
                                         give(checked(stream).info(), json);
                                       });
}

lapilli_status lapilli_buffer_create(lapilli_stream* stream, uint64_t bytes, lapilli_buffer** buffer) {
  return guarded_stream([&] {
    need(buffer, "buffer");
    *buffer = checked(stream).create_buffer(bytes);
  });
}

void lapilli_buffer_destroy(lapilli_buffer* buffer) {
  if (!has_streams || buffer == nullptr || is_forked())
    return;
  buffer->stream->destroy(buffer);
  delete buffer;
}

intptr_t lapilli_buffer_acquire(lapilli_stream* stream, uint64_t bytes) {
  lapilli_buffer* buffer = nullptr;
  return lapilli_buffer_create(stream, bytes, &buffer) == LAPILLI_OK ? reinterpret_cast<intptr_t>(buffer) : 0;
}

void lapilli_buffer_release(intptr_t buffer) { lapilli_buffer_destroy(reinterpret_cast<lapilli_buffer*>(buffer)); }

lapilli_status lapilli_buffer_create_shared(lapilli_stream* stream, uint32_t kind, uint64_t bytes,
                                            lapilli_buffer** buffer) {
  return guarded_stream([&] {
    need(buffer, "buffer");
    *buffer = checked(stream).create_shared(bytes, handle_kind(kind));
  });
}

lapilli_status lapilli_buffer_export(lapilli_buffer* buffer, uint32_t kind, lapilli_shared_memory* memory) {
  return guarded_stream([&] {
    need(memory, "memory");
    const hal::SharedMemory shared = checked(buffer).stream->share(*buffer, handle_kind(kind));
    *memory = {kind, shared.handle, shared.memory_bytes, shared.offset};
  });
}

lapilli_status lapilli_buffer_import(lapilli_stream* stream, const lapilli_shared_memory* memory, uint64_t bytes,
                                     lapilli_buffer** buffer) {
  return guarded_stream([&] {
    need(memory, "memory");
    need(buffer, "buffer");
    *buffer = checked(stream).import({handle_kind(memory->kind), memory->handle, memory->memory_bytes, memory->offset},
                                     bytes);
  });
}

lapilli_status lapilli_buffer_write(lapilli_buffer* buffer, uint64_t offset, const void* data, uint64_t bytes) {
  return guarded_stream([&] {
    checked(buffer).stream->write(*buffer, offset, items(static_cast<const std::byte*>(data), bytes, "data"));
  });
}

lapilli_status lapilli_buffer_read(lapilli_buffer* buffer, uint64_t offset, void* data, uint64_t bytes) {
  return guarded_stream(
      [&] { checked(buffer).stream->read(*buffer, offset, items(static_cast<std::byte*>(data), bytes, "data")); });
}

lapilli_status lapilli_buffer_copy(lapilli_buffer* from, uint64_t from_offset, lapilli_buffer* to, uint64_t to_offset,
                                   uint64_t bytes) {
  return guarded_stream([&] { checked(to).stream->copy(checked(from), from_offset, *to, to_offset, bytes); });
}

lapilli_status lapilli_buffer_fill(lapilli_buffer* buffer, uint64_t offset, uint64_t bytes, uint32_t pattern) {
  return guarded_stream([&] { checked(buffer).stream->fill(*buffer, offset, bytes, pattern); });
}

lapilli_status lapilli_enqueue(lapilli_stream* stream, lapilli_program* program, uint32_t method,
                               const int64_t* symbols, uint32_t n_symbols, const lapilli_slice* inputs,
                               uint32_t n_inputs, const lapilli_slice* outputs, uint32_t n_outputs) {
  return guarded_stream([&] {
    need(program, "program");
    const auto given = items(inputs, n_inputs, "inputs"), results = items(outputs, n_outputs, "outputs");
    std::vector<lapilli_slice> slices(given.begin(), given.end());
    slices.insert(slices.end(), results.begin(), results.end());
    checked(stream).enqueue(program->program, method, items(symbols, n_symbols, "symbols"), n_inputs, slices);
  });
}

lapilli_status lapilli_enqueue_tensors(lapilli_stream* stream, lapilli_program* program, uint32_t method,
                                       const int64_t* sizes, uint32_t n_sizes, const lapilli_device_tensor* inputs,
                                       uint32_t n_inputs, lapilli_device_tensor* outputs, uint32_t n_outputs) {
  return guarded_stream([&] {
    enqueue_tensors(checked(stream), program, method, items(sizes, n_sizes, "sizes"), items(inputs, n_inputs, "inputs"),
                    items(outputs, n_outputs, "outputs"));
  });
}

lapilli_status lapilli_enqueue_packed(lapilli_stream* stream, lapilli_program* program, const char* words) {
  return guarded_stream([&] {
    need(words, "words");
    std::array<int64_t, 4> head;
    std::memcpy(head.data(), words, sizeof head);
    enqueue_packed(checked(stream), program, head, words + sizeof head, nullptr);
  });
}

intptr_t lapilli_launch(lapilli_stream* stream, lapilli_program* program, const char* words) {
  lapilli_buffer* made = nullptr;
  const lapilli_status status = guarded_stream([&] {
    need(words, "words");
    std::array<int64_t, 6> head;
    std::memcpy(head.data(), words, sizeof head);
    lapilli_buffer_release(static_cast<intptr_t>(head[4]));
    made = checked(stream).create_buffer(static_cast<uint64_t>(head[5]));
    enqueue_packed(*stream->stream, program, std::span(head).first<4>(), words + sizeof head, made);
  });
  if (status == LAPILLI_OK)
    return reinterpret_cast<intptr_t>(made);
  lapilli_buffer_destroy(made);
  return 0;
}

lapilli_status lapilli_flush(lapilli_stream* stream) {
  return guarded_stream([&] { checked(stream).flush(); });
}

lapilli_status lapilli_synchronize(lapilli_stream* stream) {
  return guarded_stream([&] { checked(stream).synchronize(); });
}

lapilli_status lapilli_stream_memory(lapilli_stream* stream, lapilli_stream_memory_info* info) {
  return guarded_stream([&] {
    need(info, "info");
    *info = checked(stream).memory();
  });
}

lapilli_status lapilli_reset_peak_memory(lapilli_stream* stream) {
  return guarded_stream([&] { checked(stream).reset_peak_memory(); });
}

lapilli_status lapilli_empty_cache(lapilli_stream* stream) {
  return guarded_stream([&] { checked(stream).empty_cache(); });
}

lapilli_status lapilli_set_memory_limit(lapilli_stream* stream, uint64_t bytes) {
  return guarded_stream([&] { checked(stream).set_memory_limit(bytes); });
}
