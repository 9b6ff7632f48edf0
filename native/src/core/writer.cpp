#include "core/writer.h"

#include "base/error.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

namespace lapilli {

namespace {

constexpr uint32_t most_words = 1u << 24, most_context = 1u << 24;

// A number of the metadata, as Python's json.dumps writes an object: no text in it holds a quotation mark without a backslash.
uint32_t number_in(std::string_view json, std::string_view name, uint32_t least, uint32_t most) {
  const std::string key = cat('"', name, "\": ");
  const size_t at = json.find(key);
  uint32_t value = 0;
  const char* const end = json.data() + json.size();
  const bool read =
      at != std::string_view::npos && std::from_chars(json.data() + at + key.size(), end, value).ec == std::errc();
  check_file(read && value >= least && value <= most, "The language model is damaged: its metadata have no ", name,
             " in ", least, "..", most, ".");
  return value;
}

template <class T> lapilli_tensor tensor_of(T* data, std::initializer_list<int64_t> shape, DType dtype) {
  lapilli_tensor tensor{};
  tensor.rank = static_cast<uint32_t>(shape.size());
  std::ranges::copy(shape, tensor.shape);
  tensor.dtype = static_cast<uint32_t>(dtype);
  tensor.data = data;
  tensor.size = sizeof(T);
  for (const int64_t size : shape)
    tensor.size *= static_cast<uint64_t>(size);
  return tensor;
}

void check(bool good, const char* name, const char* accepted) {
  if (!good)
    fail(LAPILLI_INVALID_ARGUMENT, "lapilli_sampling.", name, " can be ", accepted, ".");
}

bool between(float value, float least, float most) { return value >= least && value <= most; } // NaN is not

} // namespace

Writer::Writer(std::shared_ptr<Program> program) : program_(std::move(program)) {
  const auto& metadata = program_->model().metadata;
  const auto about = std::ranges::find_if(metadata, [](const auto& entry) { return entry.first == "llm.model"; });
  if (about == metadata.end())
    fail(LAPILLI_INVALID_ARGUMENT, "This program is no language model: lapilli.LLM.save writes those.");
  if (std::ranges::any_of(metadata, [](const auto& entry) { return entry.first == "llm.encoder"; }))
    fail(LAPILLI_INVALID_ARGUMENT,
         "This language model has an encoder, and the writer has nothing for it to read: run its methods.");
  context_ = number_in(about->second, "context", 2, most_context);
  words_ = number_in(about->second, "words", 1, most_words);
  prompt_ = method("prompt");
  step_ = method("step");
  remember_ = method("remember");
  const std::vector<Symbol>& symbols = program_->method(prompt_).symbols;
  check_file(symbols.size() == 1 && symbols.front().max > 1,
             "The language model is damaged: its method \"prompt\" takes no "
             "number of tokens.");
  longest_ = static_cast<size_t>(symbols.front().max);
}

uint32_t Writer::method(std::string_view name) const {
  const std::vector<Method>& methods = program_->model().methods;
  const auto found = std::ranges::find_if(methods, [&](const Method& m) { return m.name == name; });
  check_file(found != methods.end(), "The language model is damaged: it has no method \"", name, "\".");
  return static_cast<uint32_t>(found - methods.begin());
}

void Writer::begin(std::span<const int32_t> tokens, const lapilli_sampling& sampling) {
  constexpr float hot = 1e6f, least_penalty = 1e-3f, most_penalty = 1e3f;
  check(between(sampling.temperature, 0, hot), "temperature", "0 to 1000000");
  check(sampling.top_k >= 0, "top_k", "a number >= 0 (0: all)");
  check(between(sampling.top_p, 0, 1), "top_p", "0 to 1");
  check(between(sampling.min_p, 0, 1), "min_p", "0 to 1");
  check(between(sampling.repetition_penalty, least_penalty, most_penalty), "repetition_penalty", "0.001 to 1000");
  if (tokens.empty() || tokens.size() > context_)
    fail(LAPILLI_INVALID_ARGUMENT, "A prompt of ", tokens.size(), " tokens was given; it has 1 to ", context_,
         ", the model's context. Shorten it, or compile the model with a larger context.");
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || static_cast<uint32_t>(tokens[i]) >= words_)
      fail(LAPILLI_INVALID_ARGUMENT, "Token ", i, " is ", tokens[i], "; the model has tokens 0 to ", words_ - 1, ".");
  const std::lock_guard lock(mutex_);
  const auto known = std::span(tokens_).first(cached_);
  const size_t common = static_cast<size_t>(std::ranges::mismatch(known, tokens).in1 - known.begin());
  cached_ = std::min(common, tokens.size() - 1); // the last one is read for its logits
  tokens_.assign(tokens.begin(), tokens.end());
  given_ = tokens_.size();
  sampling_ = sampling;
  if (sampling_.repetition_penalty != 1)
    remember();
}

// The program knows which tokens it saw only where it is told.
void Writer::remember() {
  std::vector<int32_t> seen(words_);
  for (const int32_t token : tokens_)
    seen[static_cast<size_t>(token)] = 1;
  int64_t line = 0;
  const std::array inputs{tensor_of(&line, {1}, DType::int64), tensor_of(seen.data(), {words_}, DType::int32)};
  Run& submitted = program_->submit(remember_, {inputs});
  program_->release(submitted); // waits
}

Writer::Token Writer::next() {
  const std::lock_guard lock(mutex_);
  if (tokens_.empty())
    fail(LAPILLI_INVALID_ARGUMENT, "There is nothing to go on from: call lapilli_writer_begin first.");
  if (tokens_.size() > context_)
    fail(LAPILLI_OUT_OF_RANGE, "The model's context of ", context_,
         " tokens is full. End the text here, or compile the model with a larger context.");
  // As TokenMethods has it: the token, its position, its line; top_k, and two numbers from which the draw follows.
  std::array<int32_t, 6> row{0, 0, 0, sampling_.top_k, 0, sampling_.seed};
  const float floor = sampling_.min_p > 0 ? sampling_.temperature * std::log(sampling_.min_p) : -HUGE_VALF;
  std::array<float, 4> limits{sampling_.temperature, sampling_.top_p, floor, sampling_.repetition_penalty};
  const lapilli_tensor numbers = tensor_of(row.data(), {1, 6}, DType::int32);
  const lapilli_tensor chosen = tensor_of(limits.data(), {1, 4}, DType::float32);
  Token found{};
  try {
    while (cached_ < tokens_.size()) {
      const size_t count = std::min(tokens_.size() - cached_, longest_);
      row[0] = tokens_[cached_];
      row[1] = static_cast<int32_t>(cached_);
      row[4] = static_cast<int32_t>(tokens_.size() - given_);
      if (count == 1) {
        found = run(step_, std::array{numbers, chosen});
      } else {
        std::vector<int64_t> part(tokens_.begin() + static_cast<std::ptrdiff_t>(cached_),
                                  tokens_.begin() + static_cast<std::ptrdiff_t>(cached_ + count));
        int64_t sequence = 0;
        found = run(prompt_, std::array{tensor_of(part.data(), {1, static_cast<int64_t>(count)}, DType::int64),
                                        tensor_of(&sequence, {1}, DType::int64), numbers, chosen});
      }
      cached_ += count;
      read_ += count;
    }
  } catch (...) {
    forget(); // who knows what the device holds
    throw;
  }
  tokens_.push_back(found.token);
  return found;
}

Writer::Token Writer::run(uint32_t method, std::span<const lapilli_tensor> inputs) {
  const Method& called = program_->method(method);
  // Its checks of int64 concern places, which lie within the context.
  const auto fits = [&](size_t index, DType dtype) { return called.outputs[index].dtype == dtype; };
  check_file(called.given_outputs().size() == 2 && (fits(0, DType::int64) || fits(0, DType::int32)) &&
                 fits(1, DType::float32),
             "The language model is damaged: its method \"", called.name, "\" gives no token and its log-probability.");
  Run& submitted = program_->submit(method, {inputs});
  if (const uint64_t most = program_->limits().run_nanoseconds; !submitted.wait(most)) {
    program_->abandon(submitted);
    fail(LAPILLI_TIMEOUT, "A token is not written after ", most / 1'000'000, " ms (run_nanoseconds).");
  }
  const auto outputs = submitted.outputs();
  Token found{-1, 0};
  if (outputs[0].bytes >= sizeof found.token && outputs[1].bytes >= sizeof found.log_probability) {
    std::memcpy(&found.token, outputs[0].mapped, sizeof found.token); // of 64 bits the lower half
    std::memcpy(&found.log_probability, outputs[1].mapped, sizeof found.log_probability);
  }
  program_->release(submitted);
  check_file(found.token >= 0 && static_cast<uint32_t>(found.token) < words_, "The model wrote token ", found.token,
             ", and there are ", words_, ".");
  return found;
}

} // namespace lapilli
