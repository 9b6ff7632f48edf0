// A picture from the application's bundle, and what MobileNetV2 sees in it. docs/apple.md says how to put the project together.
import Lapilli
import UIKit

final class ViewController: UIViewController {
    private let picture = UIImageView(image: UIImage(named: "image.png"))
    private let text = UITextView()

    private lazy var labels: [String] = {
        guard let path = Bundle.main.path(forResource: "words", ofType: "txt"), let words = try? String(contentsOfFile: path) else {
            fatalError("words.txt is not in the bundle.")
        }
        return words.components(separatedBy: .newlines)
    }()

    override func viewDidLoad() {
        super.viewDidLoad()
        picture.contentMode = .scaleAspectFit
        text.isEditable = false
        let stack = UIStackView(arrangedSubviews: [picture, text])
        stack.axis = .vertical
        stack.distribution = .fillEqually
        stack.frame = view.bounds
        stack.autoresizingMask = [.flexibleWidth, .flexibleHeight]
        view.addSubview(stack)
        // Loading compiles the kernels for this GPU the first time: not on the thread that draws.
        DispatchQueue.global(qos: .userInitiated).async { [self] in
            let said = describe()
            DispatchQueue.main.async { self.text.text = said }
        }
    }

    private func describe() -> String {
        guard let pixels = UIImage(named: "image.png")?.normalized(width: 224, height: 224) else {
            return "image.png is not in the bundle."
        }
        guard let path = Bundle.main.path(forResource: "mobilenetv2_metal", ofType: "pt") else {
            return "mobilenetv2_metal.pt is not in the bundle: examples/ios/make_model.py writes it."
        }
        do {
            let module = try LapilliModule(fileAtPath: path)
            var image = pixels
            let start = Date()
            let outputs = try image.withUnsafeMutableBytes { try module.predict(image: $0.baseAddress!) }
            let milliseconds = Int(Date().timeIntervalSince(start) * 1000)
            let best = outputs.enumerated().sorted { $0.element.floatValue > $1.element.floatValue }.prefix(3)
            let lines = best.map { "- \(labels[$0.offset])" }
            return (["\(module.device), \(milliseconds) ms"] + lines).joined(separator: "\n")
        } catch {
            return error.localizedDescription
        }
    }
}
