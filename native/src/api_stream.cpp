// The C ABI of streams.

#include "api.h"
#include "stream.h"

#include <cstring>

struct lapilli_stream {
  std::shared_ptr<lapilli::Stream> stream;
};

using namespace lapilli;

namespace {

Stream& checked(lapilli_stream* stream) {
  need(stream, "stream");
  return *stream->stream;
}

lapilli_buffer& checked(lapilli_buffer* buffer) {
  need(buffer, "buffer");
  return *buffer;
}

} // namespace

lapilli_status lapilli_stream_create(const lapilli_load_options* options, lapilli_stream** stream) {
  return guarded([&] {
    need(stream, "stream");
    const lapilli_load_options defaults{};
    *stream = new lapilli_stream{Stream::create(options != nullptr ? *options : defaults)};
  });
}

void lapilli_stream_destroy(lapilli_stream* stream) {
  if (stream == nullptr)
    return;
  lapilli_flush(stream); // buffers may live on, and what is queued may change states of a program
  delete stream;
}

lapilli_status lapilli_stream_info(lapilli_stream* stream, char** json) {
  return guarded([&] {
    need(json, "json");
    give(checked(stream).info(), json);
  });
}

lapilli_status lapilli_buffer_create(lapilli_stream* stream, uint64_t bytes, lapilli_buffer** buffer) {
  return guarded([&] {
    need(buffer, "buffer");
    *buffer = checked(stream).create_buffer(bytes);
  });
}

void lapilli_buffer_destroy(lapilli_buffer* buffer) {
  if (buffer == nullptr)
    return;
  buffer->stream->destroy(buffer);
  delete buffer;
}

intptr_t lapilli_buffer_acquire(lapilli_stream* stream, uint64_t bytes) {
  lapilli_buffer* buffer = nullptr;
  return lapilli_buffer_create(stream, bytes, &buffer) == LAPILLI_OK ? reinterpret_cast<intptr_t>(buffer) : 0;
}

void lapilli_buffer_release(intptr_t buffer) { lapilli_buffer_destroy(reinterpret_cast<lapilli_buffer*>(buffer)); }

lapilli_status lapilli_buffer_write(lapilli_buffer* buffer, uint64_t offset, const void* data, uint64_t bytes) {
  return guarded([&] {
    checked(buffer).stream->write(*buffer, offset, items(static_cast<const std::byte*>(data), bytes, "data"));
  });
}

lapilli_status lapilli_buffer_read(lapilli_buffer* buffer, uint64_t offset, void* data, uint64_t bytes) {
  return guarded([&] {
    checked(buffer).stream->read(*buffer, offset, items(static_cast<std::byte*>(data), bytes, "data"));
  });
}

lapilli_status lapilli_buffer_copy(lapilli_buffer* from, uint64_t from_offset, lapilli_buffer* to, uint64_t to_offset,
                                   uint64_t bytes) {
  return guarded([&] { checked(to).stream->copy(checked(from), from_offset, *to, to_offset, bytes); });
}

lapilli_status lapilli_buffer_fill(lapilli_buffer* buffer, uint64_t offset, uint64_t bytes, uint32_t pattern) {
  return guarded([&] { checked(buffer).stream->fill(*buffer, offset, bytes, pattern); });
}

lapilli_status lapilli_enqueue(lapilli_stream* stream, lapilli_program* program, uint32_t method,
                               const int64_t* symbols, uint32_t n_symbols, const lapilli_slice* inputs,
                               uint32_t n_inputs, const lapilli_slice* outputs, uint32_t n_outputs) {
  return guarded([&] {
    need(program, "program");
    const auto given = items(inputs, n_inputs, "inputs"), results = items(outputs, n_outputs, "outputs");
    std::vector<lapilli_slice> slices(given.begin(), given.end());
    slices.insert(slices.end(), results.begin(), results.end());
    checked(stream).enqueue(program->program, method, items(symbols, n_symbols, "symbols"), n_inputs, slices);
  });
}

lapilli_status lapilli_enqueue_packed(lapilli_stream* stream, lapilli_program* program, const char* words) {
  return guarded([&] {
    need(program, "program");
    need(words, "words");
    struct Head {
      int64_t method, symbols, inputs, outputs;
    } head;
    constexpr int64_t most = 1 << 16;
    std::memcpy(&head, words, sizeof head);
    for (const int64_t count : {head.method, head.symbols, head.inputs, head.outputs})
      if (count < 0 || count > most)
        fail(LAPILLI_INVALID_ARGUMENT, "The packed method or number of symbols, inputs or outputs is ", count, ".");
    const auto symbols = static_cast<size_t>(head.symbols), slices = static_cast<size_t>(head.inputs + head.outputs);
    thread_local std::vector<int64_t> values;
    thread_local std::vector<lapilli_slice> places;
    static_assert(sizeof(lapilli_slice) == 2 * sizeof(int64_t) || sizeof(void*) == 4);
    values.resize(symbols + 2 * slices);
    std::memcpy(values.data(), words + sizeof head, values.size() * sizeof(int64_t));
    places.resize(slices);
    for (size_t i = 0; i < slices; ++i)
      places[i] = {reinterpret_cast<lapilli_buffer*>(static_cast<intptr_t>(values[symbols + 2 * i])),
                   static_cast<uint64_t>(values[symbols + 2 * i + 1])};
    checked(stream).enqueue(program->program, static_cast<uint32_t>(head.method), std::span(values).first(symbols),
                            static_cast<size_t>(head.inputs), places);
  });
}

lapilli_status lapilli_flush(lapilli_stream* stream) {
  return guarded([&] { checked(stream).flush(); });
}

lapilli_status lapilli_synchronize(lapilli_stream* stream) {
  return guarded([&] { checked(stream).synchronize(); });
}

lapilli_status lapilli_stream_memory(lapilli_stream* stream, lapilli_stream_memory_info* info) {
  return guarded([&] {
    need(info, "info");
    *info = checked(stream).memory();
  });
}

lapilli_status lapilli_reset_peak_memory(lapilli_stream* stream) {
  return guarded([&] { checked(stream).reset_peak_memory(); });
}

lapilli_status lapilli_empty_cache(lapilli_stream* stream) {
  return guarded([&] { checked(stream).empty_cache(); });
}

lapilli_status lapilli_set_memory_limit(lapilli_stream* stream, uint64_t bytes) {
  return guarded([&] { checked(stream).set_memory_limit(bytes); });
}
