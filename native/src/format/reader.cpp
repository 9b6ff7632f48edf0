#include "format/reader.h"

#include "base/error.h"
#include "base/parallel.h"
#include "format/expr.h"
#include "format/spirv.h"

#include <algorithm>
#include <unordered_set>

namespace lapilli {

namespace {

constexpr uint64_t much_code = uint64_t{64} << 10; // threads cost less than its verification

template <class T> using Vector = flatbuffers::Vector<T>;
template <class T> using Tables = const Vector<flatbuffers::Offset<T>>*;

// Several offsets of a FlatBuffer may point to the same bytes, so a small damaged file could describe a huge program.
// All that is made of the structure counts against a budget that is proportional to its size.
class Reader {
public:
  explicit Reader(const Container& container)
      : container_(container), limits_(container.limits), budget_(container.structure.size() * 3 + (1u << 20)),
        code_budget_(container.data_size * 2 + (1u << 16)) {}

  Model run() {
    model_.file_size = container_.file_size;
    model_.checksum = container_.checksum;
    model_.structure_size = container_.structure.size();
    model_.data_size = container_.data_size;
    const schema::Program* program = verified_root();
    model_.producer = text(program->producer());
    each(program->metadata(), model_.metadata, "metadata", limits_.entries,
         [&](const schema::Metadata& entry) { return std::pair(name(entry.key()), text(entry.value())); });
    each(program->constants(), model_.constants, "constants", limits_.entries,
         [&](const schema::Constant& found) { return constant(found); });
    each(program->states(), model_.states, "states", max_states,
         [&](const schema::State& found) { return state(found); });
    each(program->host_operators(), model_.host_operators, "host operators", limits_.entries,
         [&](const flatbuffers::String& found) { return name(&found); });
    each(program->kernels(), model_.kernels, "kernels", max_kernels,
         [&](const schema::Kernel& found) { return kernel(found); });
    verify_code();
    each(program->methods(), model_.methods, "methods", max_methods,
         [&](const schema::Method& found) { return method(found); });
    check_file(!model_.methods.empty(), "The program has no methods.");
    return std::move(model_);
  }

private:
  const schema::Program* verified_root() {
    const Bytes bytes = container_.structure;
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    flatbuffers::Verifier::Options options;
    options.max_depth = 16;
    options.max_tables =
        static_cast<flatbuffers::uoffset_t>(std::min<uint64_t>({bytes.size() / 4 + 16, limits_.entries * 2, 1u << 24}));
    options.max_size = size_t{1} << 30; // FlatBuffers' own limit is 2 GiB
    check_file(bytes.size() >= 8 && bytes.size() < options.max_size, "The structure of the program is damaged: it has ",
               bytes.size(), " bytes.");
    flatbuffers::Verifier verifier(data, bytes.size(), options);
    check_file(schema::VerifyProgramBuffer(verifier), "The structure of the program is damaged.");
    return schema::GetProgram(data);
  }

  void charge(uint64_t bytes) {
    check_file(bytes <= budget_, "The structure of the program is damaged: it names the same parts again and again.");
    budget_ -= bytes;
  }

  void count(uint64_t items) {
    check_file(items <= limits_.entries - entries_, "The lists of the program have more than ", limits_.entries,
               " items, the limit (entries).");
    entries_ += items;
  }

  // Appends f(item) of every item to `into`.
  template <class T, class Into, class F>
  void each(const T* vector, Into& into, const char* what, uint64_t most, F&& f) {
    if (vector == nullptr)
      return;
    check_file(vector->size() <= most, "The program has ", vector->size(), " ", what, " in one list; at most ", most,
               " are possible.");
    count(vector->size());
    charge(uint64_t{vector->size()} * sizeof(typename Into::value_type));
    into.reserve(vector->size());
    for (const auto* item : *vector)
      into.push_back(f(*item));
  }

  std::string text(const flatbuffers::String* string, size_t longest = SIZE_MAX) {
    if (string == nullptr)
      return {};
    check_file(string->size() <= longest, "The program is damaged: a name in it has ", string->size(),
               " bytes; at most ", longest, " are possible.");
    if (string->size() > 15) // others lie in the std::string itself
      charge(string->size() + 1);
    return string->str();
  }

  std::string name(const flatbuffers::String* string) { return text(string, longest_name); }

  // Only tables are aligned by what they hold: a verified vector of structs may lie at any multiple of 4.
  template <class T> const Vector<const T*>* aligned(const Vector<const T*>* vector) const {
    check_file(vector == nullptr || reinterpret_cast<uintptr_t>(vector->Data()) % alignof(T) == 0,
               "The structure of the program is damaged: a list in it is not aligned.");
    return vector;
  }

  std::vector<uint32_t> numbers(const Vector<uint32_t>* vector) {
    if (vector == nullptr)
      return {};
    count(vector->size());
    charge(uint64_t{vector->size()} * sizeof(uint32_t));
    return {vector->begin(), vector->end()};
  }

  // A part of the data section.
  void section(uint64_t offset, uint64_t size, const std::string& what) const {
    const uint64_t total = container_.data_size;
    check_file(offset <= total && size <= total - offset, "The program is damaged: ", what, " (", size, " bytes at ",
               offset, ") lies outside of the data section of ", total, " bytes.");
    check_file(offset % 64 == 0, "The program is damaged: ", what, " is at ", offset,
               ", which is not a multiple of 64.");
  }

  static void dtype(DType found, const std::string& what) {
    check_file(found >= DType::MIN && found <= DType::MAX, "The program is damaged: ", what, " has dtype ",
               static_cast<unsigned>(found), ".");
  }

  Constant constant(const schema::Constant& found) {
    Constant result{name(found.name()), found.dtype(), numbers(found.shape()), found.offset(), found.size()};
    const std::string what = cat("constant \"", result.name, "\"");
    dtype(result.dtype, what);
    check_file(result.shape.size() <= 64, "The program is damaged: ", what, " has ", result.shape.size(),
               " dimensions.");
    section(found.offset(), found.size(), what);
    const std::vector<int64_t> shape(result.shape.begin(), result.shape.end());
    uint64_t bytes = 0;
    check_file(tensor_bytes(shape, result.dtype, bytes) && bytes == found.size(), "The program is damaged: ", what,
               " has ", found.size(), " bytes, which does not fit its shape.");
    return result;
  }

  State state(const schema::State& found) {
    State result{name(found.name()), found.dtype(), numbers(found.shape()), found.constant(), 0};
    const std::string what = cat("state \"", result.name, "\"");
    check_file(!result.name.empty() && state_names_.insert(result.name).second,
               "The program is damaged: there are two states of the name \"", result.name, "\", or it is empty.");
    dtype(result.dtype, what);
    check_file(result.shape.size() <= max_rank, "The program is damaged: ", what, " has ", result.shape.size(),
               " dimensions; at most ", max_rank, " are possible.");
    const std::vector<int64_t> shape(result.shape.begin(), result.shape.end());
    check_file(tensor_bytes(shape, result.dtype, result.bytes), "The program is damaged: ", what, " is too large.");
    if (result.constant != -1) {
      check_file(result.constant >= 0 && static_cast<size_t>(result.constant) < model_.constants.size(),
                 "The program is damaged: ", what, " begins as constant ", result.constant, " of ",
                 model_.constants.size(), ".");
      const Constant& initial = model_.constants[static_cast<size_t>(result.constant)];
      check_file(initial.dtype == result.dtype && initial.shape == result.shape, "The program is damaged: ", what,
                 " is of another dtype or shape than its initial value.");
    }
    return result;
  }

  void checks(const schema::Method& found, Method& result) {
    each(found.checks(), result.checks, "checks", limits_.entries,
         [&](const flatbuffers::String& check) { return name(&check); });
    result.integer_limit = found.integer_limit();
    check_file(result.integer_limit >= 0, "The program is damaged: inputs of method \"", result.name,
               "\" are limited to ", result.integer_limit, ".");
    check_file(result.checks.empty() || (!result.outputs.empty() && result.outputs.back().dtype == DType::int32 &&
                                         result.outputs.back().shape.empty()),
               "The program is damaged: method \"", result.name, "\" has checks, and no output for their result.");
  }

  static std::string known_formats() {
    std::vector<std::string> names;
    for (const KernelFormat format : schema::EnumValuesKernelFormat())
      names.push_back(cat(static_cast<unsigned>(format), " (", schema::EnumNameKernelFormat(format), ")"));
    return listed(names);
  }

  Kernel kernel(const schema::Kernel& found) {
    Kernel result{};
    result.name = name(found.name());
    const std::string what = cat("kernel \"", result.name, "\"");
    result.format = found.format();
    check_file(result.format >= KernelFormat::MIN && result.format <= KernelFormat::MAX, "The code of kernel \"",
               result.name, "\" is in format ", static_cast<unsigned>(result.format), ", and this player knows ",
               known_formats(), ". Update Lapilli, or compile the model again with this version.");
    result.code_offset = found.code_offset();
    section(found.code_offset(), found.code_size(), what);
    result.bindings = found.bindings();
    result.push_size = found.push_size();
    result.local = {found.local_x(), found.local_y(), found.local_z()};
    result.subgroup_size = found.subgroup_size();
    result.shared_size = found.shared_size();
    check_file(result.bindings <= max_bindings, "The program is damaged: ", what, " has ", result.bindings,
               " bindings.");
    result.types.assign(result.bindings, BindingType::storage);
    if (const auto* types = found.texel(); types != nullptr && types->size() > 0) {
      check_file(types->size() == result.bindings, "The program is damaged: ", what, " has ", result.bindings,
                 " bindings and ", types->size(), " types of them.");
      for (uint32_t i = 0; i < result.bindings; ++i) {
        result.types[i] = static_cast<BindingType>(types->Get(i));
        check_file(result.types[i] <= BindingType::MAX, "The program is damaged: ", what,
                   " has a binding of unknown type.");
      }
    }
    check_file(result.push_size <= max_push_size && result.push_size % 4 == 0, "The program is damaged: ", what,
               " has ", result.push_size, " bytes of push constants.");
    const uint32_t subgroup = result.subgroup_size;
    check_file(subgroup <= 1024 && (subgroup & (subgroup - 1)) == 0, "The program is damaged: ", what,
               " wants subgroups of ", subgroup, ".");
    code(found, result);
    return result;
  }

  // A copy, so that nobody changes it after it was verified. Kernels may share their code, and every one has its copy.
  void code(const schema::Kernel& found, Kernel& result) {
    const uint64_t size = found.code_size();
    check_file(size <= code_budget_, "The program is damaged: its kernels overlap.");
    code_budget_ -= size;
    check_file(size <= limits_.code_bytes - code_bytes_, "The kernels of the program have more than ",
               limits_.code_bytes, " bytes of code, the limit (code_bytes).");
    code_bytes_ += size;
    check_file(size % 4 == 0, "The program is damaged: the SPIR-V code of kernel \"", result.name, "\" has ", size,
               " bytes.");
    result.code_size = size;
    result.code.resize(static_cast<size_t>(size / 4));
    container_.read(found.code_offset(), std::as_writable_bytes(std::span(result.code)));
  }

  void verify_code() {
    const auto verify = [this](size_t i) { verify_spirv(model_.kernels[i]); };
    if (code_bytes_ < much_code)
      for (size_t i = 0; i < model_.kernels.size(); ++i)
        verify(i);
    else
      parallel(model_.kernels.size(), verify);
  }

  Method method(const schema::Method& found) {
    Method result{};
    result.name = name(found.name());
    each(found.symbols(), result.symbols, "symbols", max_symbols, [&](const schema::Symbol& symbol) {
      return Symbol{text(symbol.name(), longest_symbol),
                    symbol.min(),
                    symbol.max(),
                    symbol.input(),
                    symbol.axis(),
                    symbol.factor(),
                    symbol.offset(),
                    symbol.given()};
    });
    exprs(found, result);
    each(found.inputs(), result.inputs, "inputs", max_tensors,
         [&](const schema::TensorSpec& spec) { return tensor(spec, result); });
    each(found.outputs(), result.outputs, "outputs", max_tensors,
         [&](const schema::TensorSpec& spec) { return tensor(spec, result); });
    checks(found, result);
    for (const Symbol& symbol : result.symbols) {
      check_file(symbol.given ||
                     (symbol.input < result.inputs.size() && symbol.axis < result.inputs[symbol.input].shape.size()),
                 "The program is damaged: symbol ", symbol.name, " is read from axis ", symbol.axis, " of input ",
                 symbol.input, ", which does not exist.");
      check_file(symbol.min >= 0 && (symbol.max == -1 || symbol.max >= symbol.min), "The program is damaged: symbol ",
                 symbol.name, " has bounds ", symbol.min, "..", symbol.max, ".");
      check_file(symbol.factor >= 1, "The program is damaged: symbol ", symbol.name, " has factor ", symbol.factor,
                 ".");
    }
    const std::vector<bool> dynamic = symbolic(result.exprs);
    each(found.plans(), result.plans, "plans", max_plans,
         [&](const schema::Plan& item) { return plan(item, result, dynamic); });
    check_file(!result.plans.empty(), "Method \"", result.name, "\" of the program has no plans.");
    return result;
  }

  void exprs(const schema::Method& found, Method& method) {
    const auto* pool = aligned(found.exprs());
    if (pool == nullptr)
      return;
    check_file(pool->size() <= limits_.expressions - expressions_, "The program has more than ", limits_.expressions,
               " expressions, the limit (expressions).");
    expressions_ += pool->size();
    charge(uint64_t{pool->size()} * sizeof(Expr));
    method.exprs.reserve(pool->size());
    for (uint32_t i = 0; i < pool->size(); ++i) {
      const schema::Expr& expr = *pool->Get(i);
      bool holds = expr.op() >= ExprOp::MIN && expr.op() <= ExprOp::MAX;
      if (holds && expr.op() == ExprOp::symbol)
        holds = expr.value() >= 0 && static_cast<uint64_t>(expr.value()) < method.symbols.size();
      else if (holds && expr.op() != ExprOp::constant)
        holds = expr.a() < i && expr.b() < i;
      check_file(holds, "The program is damaged: expression ", i, " of method \"", method.name, "\" is invalid.");
      method.exprs.push_back({expr.value(), expr.a(), expr.b(), expr.op()});
    }
  }

  static void expr(ExprIndex index, const Method& method, const char* what) {
    check_file(index < method.exprs.size(), "The program is damaged: ", what, " names expression ", index, " of ",
               method.exprs.size(), ".");
  }

  TensorSpec tensor(const schema::TensorSpec& found, const Method& method) {
    TensorSpec result{name(found.name()), found.dtype(), numbers(found.shape())};
    dtype(result.dtype, result.name);
    check_file(result.shape.size() <= max_rank, "The program is damaged: \"", result.name, "\" has ",
               result.shape.size(), " dimensions; at most ", max_rank, " are possible.");
    for (const ExprIndex index : result.shape)
      expr(index, method, "a shape");
    return result;
  }

  Plan plan(const schema::Plan& found, const Method& method, const std::vector<bool>& dynamic) {
    Plan result{};
    result.name = name(found.name());
    if (const auto* requirements = found.requirements())
      result.requirements = {requirements->device(),
                             requirements->features(),
                             requirements->max_workgroup_invocations(),
                             {requirements->max_workgroup_size_x(), requirements->max_workgroup_size_y(),
                              requirements->max_workgroup_size_z()},
                             requirements->shared_memory(),
                             requirements->subgroup_size(),
                             requirements->subgroup_operations(),
                             requirements->max_bindings(),
                             requirements->max_texel_elements(),
                             requirements->storage_range()};
    check_file(result.requirements.device <= DeviceKind::MAX, "The program is damaged: plan \"", result.name,
               "\" asks for an unknown kind of device.");
    const size_t n_run = found.run() == nullptr ? 0 : found.run()->size();
    each(found.buffers(), result.buffers, "buffers", max_buffers,
         [&](const schema::Buffer& item) { return buffer(item, method, n_run, dynamic); });
    once_each(result, method);
    commands(found.load(), result.load, true, method, result, dynamic);
    commands(found.run(), result.run, false, method, result, dynamic);
    roundings(method, result);
    return result;
  }

  Buffer buffer(const schema::Buffer& item, const Method& method, size_t n_run, const std::vector<bool>& dynamic) {
    Buffer buffer{name(item.name()), item.kind(), item.index(), item.size(), item.first(), item.last()};
    const auto below = [&](size_t count) {
      check_file(buffer.index < count, "The program is damaged: buffer \"", buffer.name, "\" has index ", buffer.index,
                 " of ", count, ".");
    };
    expr(buffer.size, method, "a buffer");
    switch (buffer.kind) {
    case BufferKind::constant:
    case BufferKind::load_constant:
      below(model_.constants.size());
      fixed(buffer, dynamic);
      break;
    case BufferKind::packed:
      fixed(buffer, dynamic);
      break;
    case BufferKind::arena:
      check_file(buffer.first <= buffer.last && buffer.last < n_run, "The program is damaged: buffer \"", buffer.name,
                 "\" lives over commands ", buffer.first, "..", buffer.last, " of ", n_run, ".");
      break;
    case BufferKind::input:
      below(method.inputs.size());
      break;
    case BufferKind::output:
      below(method.outputs.size());
      break;
    case BufferKind::state:
      below(model_.states.size());
      fixed(buffer, dynamic);
      break;
    default:
      invalid_file("The program is damaged: buffer \"", buffer.name, "\" is of an unknown kind.");
    }
    return buffer;
  }

  // At most one buffer for an input or state, and exactly one for an output.
  static void once_each(const Plan& plan, const Method& method) {
    std::vector<std::pair<BufferKind, uint32_t>> seen;
    size_t outputs = 0;
    for (const Buffer& buffer : plan.buffers)
      if (buffer.kind == BufferKind::input || buffer.kind == BufferKind::output || buffer.kind == BufferKind::state) {
        seen.emplace_back(buffer.kind, buffer.index);
        outputs += buffer.kind == BufferKind::output;
      }
    std::ranges::sort(seen);
    const auto twice = std::ranges::adjacent_find(seen);
    check_file(twice == seen.end() || twice->first == BufferKind::output, "The program is damaged: plan \"", plan.name,
               "\" has two buffers for one ", twice == seen.end() ? "" : name_of(twice->first), ".");
    check_file(twice == seen.end() && outputs == method.outputs.size(), "The program is damaged: plan \"", plan.name,
               "\" must have one buffer for each output.");
  }

  // What is made while loading cannot depend on the sizes of a run.
  static void fixed(const Buffer& buffer, const std::vector<bool>& dynamic) {
    check_file(!dynamic[buffer.size], "The program is damaged: the size of buffer \"", buffer.name,
               "\" is needed at load and depends on an input.");
  }

  void commands(Tables<schema::Dispatch> found, std::vector<Dispatch>& into, bool loading, const Method& method,
                const Plan& plan, const std::vector<bool>& dynamic) {
    each(found, into, "commands", max_commands, [&](const schema::Dispatch& item) {
      Dispatch result = dispatch(item, static_cast<uint32_t>(into.size()), loading, method, plan);
      if (loading)
        at_load(result, dynamic);
      return result;
    });
  }

  Dispatch dispatch(const schema::Dispatch& found, uint32_t position, bool loading, const Method& method,
                    const Plan& plan) {
    Dispatch result{};
    result.label = name(found.label());
    result.kernel = found.kernel();
    result.written = found.written();
    result.barrier = found.barrier();
    result.params = numbers(found.params());
    result.groups = {found.groups_x(), found.groups_y(), found.groups_z()};
    result.flops = found.flops();
    result.bytes = found.bytes();
    result.rounds_input = found.rounds_input();
    const std::string what = cat(loading ? "load" : "run", " command ", position, " (", result.label, ")");
    check_file(result.kernel < model_.kernels.size(), "The program is damaged: ", what, " names kernel ", result.kernel,
               " of ", model_.kernels.size(), ".");
    const Kernel& kernel = model_.kernels[result.kernel];
    if (const auto* bindings = found.bindings()) {
      count(bindings->size());
      charge(uint64_t{bindings->size()} * sizeof(Binding));
      result.bindings.reserve(bindings->size());
      for (const schema::Binding* item : *bindings)
        result.bindings.push_back({item->buffer(), item->offset(), item->size()});
    }
    check_file(result.bindings.size() == kernel.bindings, "The program is damaged: ", what, " gives ",
               result.bindings.size(), " bindings to kernel \"", kernel.name, "\", which has ", kernel.bindings, ".");
    check_file(result.params.size() * 4 == kernel.push_size, "The program is damaged: ", what, " gives ",
               result.params.size() * 4, " bytes of push constants to kernel \"", kernel.name, "\", which has ",
               kernel.push_size, ".");
    check_file(kernel.bindings == max_bindings || result.written >> kernel.bindings == 0,
               "The program is damaged: ", what, " writes bindings that it does not have.");
    check_file((kernel.stored & ~result.written) == 0, "The program is damaged: ", what,
               " says that it only reads what kernel \"", kernel.name, "\" writes.");
    for (const ExprIndex index : result.params)
      expr(index, method, "a parameter");
    for (const ExprIndex index : result.groups)
      expr(index, method, "a number of work groups");
    expr(result.flops, method, "a number of operations");
    expr(result.bytes, method, "a number of bytes");
    for (size_t i = 0; i < result.bindings.size(); ++i)
      binding(result, i, kernel.types[i], what, position, loading, method, plan);
    return result;
  }

  static void binding(const Dispatch& dispatch, size_t index, BindingType type, const std::string& what,
                      uint32_t position, bool loading, const Method& method, const Plan& plan) {
    const Binding& binding = dispatch.bindings[index];
    expr(binding.offset, method, "a binding");
    expr(binding.size, method, "a binding");
    check_file(binding.buffer < plan.buffers.size(), "The program is damaged: ", what, " names buffer ", binding.buffer,
               " of ", plan.buffers.size(), ".");
    const Buffer& buffer = plan.buffers[binding.buffer];
    const bool written = dispatch.written >> index & 1;
    check_file(!written || type == BindingType::storage, "The program is damaged: ", what, " writes a texel buffer.");
    bool allowed = false;
    switch (buffer.kind) {
    case BufferKind::constant:
    case BufferKind::load_constant:
      allowed = !written && (loading || buffer.kind == BufferKind::constant);
      break;
    case BufferKind::packed:
      allowed = loading || !written;
      break;
    case BufferKind::input:
      allowed = !loading && !written;
      break;
    case BufferKind::output:
    case BufferKind::state:
      allowed = !loading;
      break;
    case BufferKind::arena:
      allowed = !loading && buffer.first <= position && position <= buffer.last;
      break;
    }
    check_file(allowed, "The program is damaged: ", what, " may not ", written ? "write" : "read", " buffer \"",
               buffer.name, "\" of kind ", name_of(buffer.kind), ".");
  }

  // What a run may leave out, the host does instead: so it is all that is done to these buffers.
  static void roundings(const Method& method, const Plan& plan) {
    for (const Dispatch& dispatch : plan.load)
      check_file(!dispatch.rounds_input, "The program is damaged: load command \"", dispatch.label,
                 "\" rounds an input, and there are none yet.");
    std::vector<uint32_t> read(plan.buffers.size()), written(plan.buffers.size()); // by how many bindings
    for (const Dispatch& dispatch : plan.run)
      for (size_t i = 0; i < dispatch.bindings.size(); ++i)
        ++((dispatch.written >> i & 1) != 0 ? written : read)[dispatch.bindings[i].buffer];
    for (const Dispatch& dispatch : plan.run) {
      if (!dispatch.rounds_input)
        continue;
      bool is_alone = dispatch.bindings.size() == 2 && (dispatch.written == 1 || dispatch.written == 2);
      if (is_alone) {
        const auto [from, to] = rounded_by(dispatch);
        const Buffer &input = plan.buffers[from], &result = plan.buffers[to];
        is_alone = input.kind == BufferKind::input && method.inputs[input.index].dtype == DType::float32 &&
                   result.kind == BufferKind::arena && read[from] == 1 && written[to] == 1;
      }
      check_file(is_alone, "The program is damaged: run command \"", dispatch.label,
                 "\" must round an input of float32 that no other command reads, into a temporary buffer that no other "
                 "writes.");
    }
  }

  static void at_load(const Dispatch& dispatch, const std::vector<bool>& dynamic) {
    bool depends = false;
    for (const Binding& binding : dispatch.bindings)
      depends = depends || dynamic[binding.offset] || dynamic[binding.size];
    for (const ExprIndex index : dispatch.params)
      depends = depends || dynamic[index];
    for (const ExprIndex index : dispatch.groups)
      depends = depends || dynamic[index];
    check_file(!depends, "The program is damaged: load command \"", dispatch.label, "\" depends on an input.");
  }

  const Container& container_;
  const Limits& limits_;
  uint64_t budget_, code_budget_;
  uint64_t entries_ = 0, expressions_ = 0, code_bytes_ = 0;
  std::unordered_set<std::string> state_names_;
  Model model_;
};

} // namespace

Model read_model(const Container& container) { return Reader(container).run(); }

} // namespace lapilli
